"""Confidences are believed as far as they held; whole runs are simulated with a cost table, without a clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hf_dcut.budget import cut, positions
from hf_dcut.calibration import Calibration
from hf_dcut.cost_table import CostTable
from hf_dcut.skipping import SkipRule
from hf_dcut.types import Scores

D, RATIOS = 7, (0.25, 0.5, 0.75, 1.0)
PLAIN, DRAFT, TOKEN = 0.135, 0.015, 0.0016  # seconds of a plain step, of a draft, of one more packed token
Confidences = Callable[[int, torch.Generator], torch.Tensor]


def costs_of(batch: int) -> CostTable:
    totals = {batch, *(positions(ratio, batch, D) for ratio in RATIOS)}
    return CostTable.from_rows({batch: {0: PLAIN, **{t: PLAIN + DRAFT + TOKEN * (t - batch) for t in totals}}}, D)


def sure(batch: int, generator: torch.Generator) -> torch.Tensor:
    return torch.full((batch, D), 0.9)


def moody(batch: int, generator: torch.Generator) -> torch.Tensor:
    """Blocks are of four kinds, from hopeless to nearly certain."""
    kinds = torch.tensor([0.3, 0.6, 0.9, 0.97])
    return kinds[torch.randint(4, (batch, 1), generator=generator)].expand(batch, D)


def speed(
    batch: int, steps: int, confidences: Confidences, honesty: float, adapts: bool = True, seed: int = 0
) -> float:
    """Returns the tokens a second of the policy, over those of plain steps.

    Args:
        batch: B.
        steps: how many.
        confidences: [B, D] of each drafted step.
        honesty: a draft of confidence c holds with probability honesty * c.
        adapts: whether calibration and skipping are at work; without them every step drafts and is believed.
        seed: of the draws.
    """
    generator, costs = torch.Generator().manual_seed(seed), costs_of(batch)
    calibration, skip = Calibration(), SkipRule(costs)
    seconds, tokens = 0.0, 0
    for _ in range(steps):
        tokens += batch
        if adapts and not skip.drafts_next():
            seconds += costs.plain(batch)
            continue
        confidence = confidences(batch, generator)
        scores = Scores(confidence.cumprod(1), torch.ones(batch, D, dtype=torch.bool))
        chosen = cut(scores, RATIOS, costs.drafted, calibration.belief if adapts else 1.0)
        holds = torch.rand(batch, D, generator=generator) < honesty * confidence
        accepted_each = (holds.cumprod(1).bool() & chosen.keep).sum(1).tolist()
        accepted = sum(accepted_each)
        seconds += costs.drafted(batch, chosen.total)
        tokens += accepted
        calibration.observe(chosen.promised, accepted)
        skip.observe([1 + a for a in accepted_each], chosen.total, kv_length=0)
    return tokens / seconds * PLAIN / batch


def test_a_drafter_that_is_sure_and_always_wrong_costs_under_five_percent_of_a_short_answer() -> None:
    assert speed(16, 40, sure, honesty=0.0, adapts=False) < 0.5
    assert speed(16, 40, sure, honesty=0.0) >= 0.95


@pytest.mark.parametrize("batch", [1, 4, 16, 64])
@pytest.mark.parametrize("steps", [40, 400])
def test_a_calibrated_drafter_loses_less_than_one_percent(batch: int, steps: int) -> None:
    runs = 10 if steps == 40 else 2
    free, adapted = (
        sum(speed(batch, steps, moody, honesty=1.0, adapts=adapts, seed=seed) for seed in range(runs))
        for adapts in (False, True)
    )
    assert free / runs > 1.0, "drafting pays here"
    assert adapted > 0.99 * free


def test_a_drafter_that_is_half_as_good_as_it_says_gets_smaller_budgets() -> None:
    assert speed(16, 400, sure, honesty=0.5, adapts=False) < speed(16, 400, sure, honesty=0.5)


def test_belief_is_the_ratio_of_what_held_and_forgets() -> None:
    calibration = Calibration()
    assert calibration.belief == 1.0
    for _ in range(100):
        calibration.observe(10.0, 4)
    assert calibration.belief == pytest.approx(0.4, abs=0.01)
    for _ in range(100):
        calibration.observe(10.0, 8)
    assert calibration.belief == pytest.approx(0.8, abs=0.01)


def test_more_than_promised_is_not_believed_beyond_its_word() -> None:
    calibration = Calibration()
    calibration.observe(1.0, 10)
    assert calibration.belief == 1.0
