"""What remembering answers is worth where prompts come again: epochs of rollouts, several drawn answers a prompt.

    python examples/rollouts.py --temperature 0.7

Every epoch draws new answers to the same prompts. They are drawn with the same seeds in three ways, each of which must
give the same tokens: without drafts, with a drafter, and with a `SuffixDrafter` beside it that has seen all epochs
before. The ways take turns at going first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_dcut
from hf_dcut.bench.prompts import encode_each, read_prompts
from hf_dcut.profiling import powers_of_two

PLAIN, DRAFTER, MEMORY = "no drafts", "drafter", "drafter and memory"
# Tokens of every answer, tokens/s, and tokens of an answer in each step, of each way.
Epoch = dict[str, tuple[list[list[int]], float, float]]


def rollouts(
    model: PreTrainedModel,
    drafter: hf_dcut.Drafter,
    memory: hf_dcut.Drafter,
    prompts: Sequence[list[int]],
    epochs: int,
    dcut: Any = True,
    **options: Any,
) -> Iterator[Epoch]:
    """Yields what came of each epoch.

    Args:
        model: the target.
        drafter: that remembers nothing.
        memory: the same with a `SuffixDrafter` beside it.
        prompts: token ids of each.
        epochs: how many.
        dcut: of the ways with drafts.
        options: of `generate_batch`.
    """
    ways: dict[str, dict[str, Any]] = {
        PLAIN: {"dcut": "none"},
        DRAFTER: {"assistant_model": drafter, "dcut": dcut},
        MEMORY: {"assistant_model": memory, "dcut": dcut},
    }
    for epoch in range(epochs):
        found: Epoch = {}
        turn = epoch % len(ways)
        for name in [*ways, *ways][turn : turn + len(ways)]:
            begin = time.perf_counter()
            results = hf_dcut.generate_batch(
                model, prompts, do_sample=True, seed=epoch, progress_bar=False, **options, **ways[name]
            )
            seconds, said = time.perf_counter() - begin, [result.generated_tokens for result in results.values()]
            tokens, steps = sum(map(len, said)), sum(result.totals.steps for result in results.values())
            # The first token of an answer comes with its prompt.
            found[name] = said, tokens / seconds, (tokens - len(said)) / steps
        yield {name: found[name] for name in ways}


def main() -> None:
    """Draws the rollouts, and prints the speed of each way and epoch, and how many tokens a step brings an answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/smollm2-135m-instruct")
    parser.add_argument("--drafter", default="examples/drafter+lookup")
    parser.add_argument("--data", default="gsm8k")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--answers", type=int, default=4, help="drawn of each prompt in each epoch")
    parser.add_argument("--slots", type=int, default=8, help="requests at once")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--dcut", default="auto", help="auto, or a share of the positions")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.target)
    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32).eval()
    prompts = [list(ids) for ids in encode_each(tokenizer, read_prompts(options.data)[: options.prompts])]
    sampling = {
        "max_batch_size": options.slots,
        "max_new_tokens": options.max_new_tokens,
        "num_return_sequences": options.answers,
        "temperature": options.temperature,
    }
    drafter = hf_dcut.AutoDrafter.named(options.drafter)
    memory = hf_dcut.BestOf([drafter, hf_dcut.SuffixDrafter()])
    dcut = "auto" if options.dcut == "auto" else float(options.dcut)
    for one in (drafter, memory) if dcut == "auto" else ():
        hf_dcut.warmup(model, one, powers_of_two(options.slots), True, max(map(len, prompts)) + options.max_new_tokens)
    for number, epoch in enumerate(rollouts(model, drafter, memory, prompts, options.epochs, dcut, **sampling), 1):
        answers, base, _ = epoch[PLAIN]
        same = all(said == answers for said, _, _ in epoch.values())
        print(f"epoch {number}: {len(answers)} answers, {'the same' if same else 'NOT the same'} in all ways")
        for name, (_, speed, each) in epoch.items():
            print(f"  {name:20} {speed:7.1f} tokens/s  {speed / base:.2f}  {each:5.2f} tokens a step", flush=True)


if __name__ == "__main__":
    main()
