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


def test_chance_is_that_of_the_chi_square_table(chance: Callable[..., float]) -> None:
    # Quantiles of the chi-square distribution: 3.841 and 18.467 are exceeded by 0.05 with one degree of freedom and by
    # 0.001 with four.
    assert abs(chance(torch.tensor([600, 400]), torch.tensor([0.569, 0.431]).double()) - 0.0477) < 1e-3
    law = torch.full((5,), 0.2).double()
    assert chance(torch.tensor([200] * 5), law) == 1.0
    even = torch.tensor([200 + 43, 200 - 43, 200, 200, 200])  # 2 * 43 ** 2 / 200 = 18.49
    assert abs(chance(even, law) - 0.001) < 2e-5


def test_chance_takes_rare_outcomes_together(chance: Callable[..., float]) -> None:
    law = torch.tensor([0.5, 0.49, *[0.0001] * 100]).double()
    counts = torch.tensor([500, 490, *[0] * 90, *[1] * 10])
    assert chance(counts, law) > 1 - 1e-9
    assert 0.9 < chance(torch.tensor([50, 49, 1, *[0] * 99]), law) < 1.0, "still too rare: one with the rarest other"
    with pytest.raises(AssertionError, match="no probability"):
        chance(torch.tensor([5, 1]), torch.tensor([1.0, 0.0]))


def test_unwritten_memory_shows(poisoned_memory: None) -> None:
    assert torch.empty(3).isnan().all()
    assert torch.empty(3, dtype=torch.int32).eq(torch.iinfo(torch.int32).max).all()
