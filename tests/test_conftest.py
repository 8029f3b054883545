"""The shared targets are what the tests take them for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_tiny_text_varies_and_depends_on_the_prompt(make_target: Callable[..., PreTrainedModel], kind: str) -> None:
    model = make_target(kind, eos_token_id=None)
    prompts = torch.randint(3, 101, (4, 7), generator=torch.Generator().manual_seed(0))
    prompts[1, 1:] = prompts[0, 1:]
    text = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=48)[:, 7:]
    assert all(len(set(row)) >= 16 for row in text.tolist())
    assert len({tuple(row) for row in text.tolist()}) == 4


def test_tiny_weights_follow_the_seed_and_leave_the_global_generator(
    tiny_llama: Callable[..., PreTrainedModel],
) -> None:
    torch.manual_seed(5)
    first, again, other = tiny_llama(), tiny_llama(), tiny_llama(torch.float32, seed=1)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight.float(), other.lm_head.weight)
    assert (first.dtype, other.dtype, first.training) == (torch.float64, torch.float32, False)


def test_unwritten_memory_shows(poisoned_memory: None) -> None:
    assert torch.empty(3).isnan().all()
    assert torch.empty(3, dtype=torch.int32).eq(torch.iinfo(torch.int32).max).all()
