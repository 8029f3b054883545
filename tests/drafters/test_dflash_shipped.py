"""The drafter in examples/drafter, on a text that its target wrote: rows or positions off by one show here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dcut.drafters import AutoDrafter
from hf_dcut.drafters.base import BoundDrafter
from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.types import Batch, Committed

DRAFTER = Path(__file__).resolve().parents[2] / "examples" / "drafter"

QUESTION = (
    "A baker sells 12 loaves in the morning and twice as many in the afternoon. Each loaf costs 3 dollars. "
    "How much money does the baker make? Let's think step by step."
)
# Greedy, in float32.
ANSWER = (
    "To solve this problem, we need to break it down step by step. Let's start by understanding the information "
    "given:\n\nThe baker sells 12 loaves in the morning and 2 times that amount in the afternoon. This means the "
    "total amount sold is 12 * 2 = 24 loaves.\n\nNow, let's consider the cost of one loaf. If we multiply 12 by 2,"
)


def observe(bound: BoundDrafter, ids: torch.Tensor, taps: torch.Tensor, first: int, end: int) -> None:
    cell = torch.arange(first, end)
    bound.observe(Committed(torch.zeros_like(cell), cell, cell, ids[first:end], taps[first:end], (), (), (), ()))


def propose(bound: BoundDrafter, ids: torch.Tensor, length: int) -> torch.Tensor:
    zero = torch.zeros(1, dtype=torch.int64)
    return bound.propose(Batch(zero, zero + length, ids[length : length + 1], zero + 99, zero, zero)).token[0]


def test_it_is_what_its_card_says() -> None:
    drafter = AutoDrafter.from_pretrained(DRAFTER)
    assert isinstance(drafter, DFlashDrafter)
    assert (drafter.draft_tokens, drafter.taps) == (7, (1, 8, 14, 20, 27))
    assert drafter.dtype == torch.bfloat16
    ids = drafter.model.draft_ids()
    assert ids is not None
    assert len(set(ids.tolist())) == 8192
    # K and V of two layers, three heads of 64 numbers, two bytes each.
    assert drafter.cell_bytes(torch.nn.Identity()) == 2 * 2 * 3 * 64 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_it_drafts_what_its_target_writes(smollm2: Path, dtype: torch.dtype) -> None:
    target = AutoModelForCausalLM.from_pretrained(smollm2, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chat = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    start = len(tokenizer(prompt).input_ids)
    ids = tokenizer(prompt + ANSWER, return_tensors="pt").input_ids
    drafter = AutoDrafter.from_pretrained(DRAFTER, dtype=dtype)
    drafter.check(target)
    states = target(ids, output_hidden_states=True).hidden_states
    taps, ids = torch.cat([states[tap + 1][0] for tap in drafter.taps], dim=-1), ids[0]
    bound = drafter.bind(target, slots=1, length=len(ids) + drafter.draft_tokens)
    observe(bound, ids, taps, 0, start)
    length, steps = start, 0
    while length < len(ids) - 1:
        right = (
            propose(bound, ids, length)[: len(ids) - 1 - length] == ids[length + 1 : length + 1 + drafter.draft_tokens]
        )
        added = int(right.int().cumprod(0).sum()) + 1
        observe(bound, ids, taps, length, length + added)
        length, steps = length + added, steps + 1
    # The first weights had 1.85; with positions, or the rows of the taps, off by one in either direction 1.27 to 1.46.
    assert (len(ids) - 1 - start) / steps > 1.7, (len(ids) - start, steps)
