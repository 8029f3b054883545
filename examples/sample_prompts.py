"""Writes prompts that a chat model makes up itself, to train a drafter on where there are none like those in use.

The model continues its chat template from where the user speaks, with sampling, so the prompts are as varied as what it
was tuned on (the idea of Magpie, arXiv 2406.08464). One JSON object a line, as `hf-dcut train --prompts` takes them:

    python examples/sample_prompts.py --target models/smollm2-135m-instruct --count 2000 --out prompts.jsonl
    hf-dcut train --target models/smollm2-135m-instruct --prompts prompts.jsonl --out my-drafter
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import hf_dcut

_MARK = "@@user@@"


def user_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """Returns the tokens of the chat template before a user's words, and the one that ends them.

    Raises:
        ValueError: the template shows no user's words, or ends them with no token of its own.
    """
    chat = [{"role": "user", "content": _MARK}]
    before, mark, after = str(tokenizer.apply_chat_template(chat, tokenize=False)).partition(_MARK)
    ends = tokenizer(after, add_special_tokens=False)["input_ids"]
    if not mark or not ends or ends[0] not in tokenizer.all_special_ids:
        raise ValueError("the chat template ends a user's words with no special token: give prompts of your own")
    return tokenizer(before, add_special_tokens=False)["input_ids"], ends[0]


def sample_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    temperature: float = 0.9,
    max_new_tokens: int = 64,
    slots: int = 64,
) -> Iterator[str]:
    """Yields prompts, none twice; what has fewer than 15 characters, or does not end in time, is left out.

    Args:
        model, tokenizer: the target.
        count: how many are tried.
        temperature: of sampling.
        max_new_tokens: of a prompt.
        slots: prompts in work at once.
    """
    begin, end = user_turn(tokenizer)
    results = hf_dcut.iterate_batch(
        model,
        [begin] * count,
        dcut="none",
        max_batch_size=slots,
        max_new_tokens=max_new_tokens,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        eos_token_id=end,
    )
    seen = set()
    for result in results:
        text = tokenizer.decode(result.generated_tokens, skip_special_tokens=True).strip()
        if result.finish_reason == "eos" and len(text) >= 15 and text not in seen:
            seen.add(text)
            yield text


def main() -> None:
    """Writes the file that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or Hub id of the model")
    parser.add_argument("--count", type=int, default=2000, help="prompts to try (default: 2000)")
    parser.add_argument("--out", type=Path, required=True, help="JSON-lines file to write")
    parser.add_argument("--dtype", default="auto", help="of the model, such as bfloat16 (default: as saved)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    model = AutoModelForCausalLM.from_pretrained(given.target, dtype=given.dtype)
    tokenizer = AutoTokenizer.from_pretrained(given.target)
    with open(given.out, "w", encoding="utf-8") as lines:
        for number, prompt in enumerate(sample_prompts(model, tokenizer, given.count)):
            lines.write(json.dumps({"id": f"sampled/{number}", "prompt": prompt}) + "\n")
            lines.flush()


if __name__ == "__main__":
    main()
