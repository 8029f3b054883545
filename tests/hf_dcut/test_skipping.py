"""Drafting stops where it does not pay, and is tried again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hf_dcut.cost_table import CostTable
from hf_dcut.skipping import SkipRule

D = 3
PLAIN, DRAFTED = 1.0, 1.5
Committed = Callable[[int], int]


def make_rule(batch: int, cost: float = DRAFTED) -> SkipRule:
    return SkipRule(CostTable.from_rows({batch: {0: PLAIN, batch: cost, 4 * batch: cost}}, D))


def run(batch: int, steps: int, committed: Committed, cost: float = DRAFTED) -> list[bool]:
    """Returns which of the steps drafted, when step i commits so many tokens a request."""
    rule, drafted = make_rule(batch, cost), []
    for step in range(steps):
        drafted.append(rule.drafts_next())
        if drafted[-1]:
            rule.observe(batch, 4 * batch, batch * committed(step), kv_length=64)
    return drafted


def pauses(drafted: list[bool]) -> list[int]:
    """Returns the lengths of the runs of plain steps between drafted ones."""
    return [len(gap) for gap in "".join("d" if d else "." for d in drafted).split("d") if gap]


@pytest.mark.parametrize("batch", [1, 8, 48])
def test_drafts_that_pay_are_never_skipped(batch: int) -> None:
    assert all(run(batch, 300, lambda step: 2))


def test_a_gain_that_only_pays_on_average_is_not_skipped() -> None:
    assert all(run(8, 300, lambda step: 1 if step % 2 else 3))


@pytest.mark.parametrize(
    ("cost", "expected"),
    # The first pause makes the loss a twentieth of it: 0.02, 0.09, 0.5 and 2 plain steps.
    [(1.02, [1, 2, 4, 8, 16, 32]), (1.09, [2, 4, 8, 16, 32, 32]), (1.5, [10, 20, 32, 32]), (3.0, [32, 32, 32])],
)
def test_pauses_make_up_for_the_loss_and_double_up_to_32(cost: float, expected: list[int]) -> None:
    assert pauses(run(64, 300, lambda step: 1, cost))[: len(expected)] == expected


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_useless_drafts_cost_a_few_percent_of_a_long_run(batch: int) -> None:
    steps = 1000
    drafted = sum(run(batch, steps, lambda step: 1))
    assert (steps - drafted) * PLAIN + drafted * DRAFTED < 1.05 * steps * PLAIN


def test_one_unlucky_step_of_one_request_stops_nothing() -> None:
    assert all(run(1, 20, lambda step: 1 if step == 0 else 2))


def test_a_large_batch_is_evidence_enough_at_once() -> None:
    assert run(64, 2, lambda step: 1) == [True, False]


def test_drafting_resumes_when_it_pays_again() -> None:
    drafted = run(64, 400, lambda step: 1 if step < 100 else 4)
    assert all(drafted[150:]), "a probe finds out"
    assert not all(drafted[:100])


def test_after_a_good_time_pauses_are_short_again() -> None:
    drafted = run(64, 400, lambda step: 4 if 100 <= step < 300 else 1, cost=1.02)
    assert pauses(drafted[150:])[:4] == [1, 2, 4, 8]
