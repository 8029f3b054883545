"""A real model in float32, on prompts of a real benchmark.

In float32 the packed row and the padded one round differently, so where the two best tokens are all but equal either
may win, as in plain `generate` with another batch size. Anywhere else a difference is a fault.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_dcut import AutoDrafter, DCutOutput, PromptLookupDrafter
from hf_dcut.drafters.base import Drafter

ROOT = Path(__file__).resolve().parent.parent
DRAFTER = ROOT / "examples" / "drafter"
PROMPTS = ROOT / "hf_dcut" / "bench" / "data" / "gsm8k.jsonl"
ROWS, NEW = 16, 48
# Rounding moves a logit by some 1e-5 here; a wrong token has lost by whole units.
CLOSE = 1e-3
ROWS_THAT_MAY_DIFFER = 1

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(smollm2: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def inputs(smollm2: Path) -> dict[str, torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2, padding_side="left")
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[:ROWS]
    chats = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]
    text = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    return dict(tokenizer(text, return_tensors="pt", padding=True, add_special_tokens=False))


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> Any:
    options = {"output_logits": True, "return_dict_in_generate": True}
    return model.generate(**inputs, do_sample=False, max_new_tokens=NEW, **options)


def differences(plain: Any, output: DCutOutput, width: int) -> list[float]:
    """Returns, for each row that differs, how far apart plain generate's two best logits were where it first does."""
    margins = []
    for row, (expected, tokens) in enumerate(zip(plain.sequences, output.sequences, strict=True)):
        length = min(len(expected), len(tokens))
        unequal = (expected[:length] != tokens[:length]).nonzero()
        if len(unequal):
            best = plain.logits[int(unequal[0]) - width][row].float().topk(2).values
            margins.append(float(best[0] - best[1]))
    return margins


def check(model: PreTrainedModel, inputs: dict[str, torch.Tensor], plain: Any, drafter: Drafter) -> DCutOutput:
    options = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True}
    output = model.generate(**inputs, **options, assistant_model=drafter, dcut=0.5)
    margins = differences(plain, output, inputs["input_ids"].shape[1])
    assert all(margin < CLOSE for margin in margins)
    assert len(margins) <= ROWS_THAT_MAY_DIFFER
    return output


def test_prompt_lookup(model: PreTrainedModel, inputs: dict[str, torch.Tensor], plain: Any) -> None:
    output = check(model, inputs, plain, PromptLookupDrafter(10))
    assert output.stats is not None
    assert output.stats.mean_accepted_tokens > 1.1, "numbers and names of the question come again"


def test_the_shipped_drafter(model: PreTrainedModel, inputs: dict[str, torch.Tensor], plain: Any) -> None:
    output = check(model, inputs, plain, AutoDrafter.from_pretrained(DRAFTER, dtype=torch.float32))
    assert output.stats is not None
    assert output.stats.mean_accepted_tokens > 1.3, "trained for this model"
