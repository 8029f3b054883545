"""Sums over steps, and the identities they obey."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcut.stats import STAGES, Stats, StepRecord, Stopwatch

D = 4


def step(
    kept: list[int], accepted: list[int], budget: float | None = 0.5, committed: list[int] | None = None
) -> StepRecord:
    rows = len(kept)
    return StepRecord(
        requests=list(range(rows)),
        drafted=[D if budget else 0] * rows,
        kept=kept,
        accepted=accepted,
        committed=committed or [a + 1 for a in accepted],
        budget=budget,
        total=rows + sum(kept),
        seconds={"draft": 0.25, "verify": 0.5, "total": 0.75},
    )


PLAIN = step([0, 0], [0, 0], budget=None)
READING = step([], [], budget=None)


@pytest.fixture
def stats() -> Stats:
    stats = Stats(records=[], new_tokens=20, seconds=4.0, profile_seconds=1.5)
    for record in (READING, step([2, 0], [1, 0]), PLAIN, step([4, 3], [4, 2], 1.0), step([1], [0])):
        stats.add(record, D)
    return stats


def test_sums(stats: Stats) -> None:
    assert (stats.steps, stats.drafted_steps, stats.plain_steps) == (4, 3, 1), "reading alone is no decoding step"
    assert (stats.rows, stats.drafted, stats.kept, stats.accepted_tokens) == (5, 5 * D, 10, 7)
    assert stats.committed_tokens == 2 + 1 + 5 + 3 + 1
    assert (stats.verified_positions, stats.offered_positions) == (4 + 9 + 2, 5 * (D + 1))
    assert dict(stats.histogram) == {0: 2, 1: 1, 2: 1, 4: 1}
    assert dict(stats.budgets) == {0.5: 2, 1.0: 1}


def test_quotients(stats: Stats) -> None:
    assert stats.mean_accepted_tokens == 12 / 5
    assert stats.kept_share == 15 / 25
    assert stats.drafted_share == 3 / 4
    assert stats.tokens_per_second == 5.0


def test_quotients_of_nothing_are_zero() -> None:
    empty = Stats()
    assert (empty.mean_accepted_tokens, empty.kept_share, empty.drafted_share, empty.tokens_per_second) == (0, 0, 0, 0)


def test_stages_add_up(stats: Stats) -> None:
    assert stats.stage_seconds == {**dict.fromkeys(STAGES, 0.0), "draft": 5 * 0.25, "verify": 5 * 0.5}


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.tuples(st.integers(0, D), st.integers(0, D)), max_size=4))))
def test_identities(steps: list[tuple[bool, list[tuple[int, int]]]]) -> None:
    stats = Stats(records=[])
    for drafts, rows in steps:
        kept = [k if drafts else 0 for k, _ in rows]
        accepted = [min(k, a) for k, (_, a) in zip(kept, rows, strict=True)]
        if rows or not drafts:
            stats.add(step(kept, accepted, 0.5 if drafts else None), D)
    assert sum(stats.histogram.values()) == stats.rows
    assert sum(accepted * count for accepted, count in stats.histogram.items()) == stats.accepted_tokens
    assert stats.committed_tokens == stats.accepted_tokens + stats.rows
    assert stats.steps == stats.drafted_steps + stats.plain_steps == len(stats.kept_depths)
    assert sum(map(sum, stats.kept_depths)) == stats.kept
    assert sum(map(sum, stats.accepted)) == stats.accepted_tokens


def test_steps_one_by_one(stats: Stats) -> None:
    assert stats.kept_depths == [[2, 0], [0, 0], [4, 3], [1]]
    assert stats.accepted == [[1, 0], [0, 0], [4, 2], [0]]


@pytest.mark.parametrize("name", ["kept_depths", "accepted"])
def test_single_steps_need_records(name: str) -> None:
    with pytest.raises(ValueError, match="return_dict_in_generate=True"):
        getattr(Stats(), name)


def test_to_dict_is_json(stats: Stats) -> None:
    values = json.loads(json.dumps(stats.to_dict()))
    assert values["histogram"] == {"0": 2, "1": 1, "2": 1, "4": 1}
    assert values["budgets"] == {"0.5": 2, "1.0": 1}
    assert values["mean_accepted_tokens"] == 12 / 5
    assert "records" not in values


def test_printing(stats: Stats) -> None:
    assert str(stats).splitlines() == [
        "20 new tokens in 4.00 s: 5.0 tokens/s",
        "4 steps, 75% of them drafted",
        "2.40 tokens a request and drafted step, 60% of positions verified",
        "budgets chosen: 0.5 x 2, 1 x 1",
        "drafts accepted: 0: 2, 1: 1, 2: 1, 4: 1",
        "time: draft 33%, verify 67%",
        "cost table measured beforehand in 1.5 s",
    ]
    assert str(Stats()).startswith("0 new tokens")


def test_the_stopwatch_charges_each_stage() -> None:
    watch = Stopwatch()
    for stage in ("draft", "verify", "draft"):
        time.sleep(0.002)
        watch.lap(stage)
    seconds = watch.stop()
    assert seconds["draft"] >= 0.004
    assert seconds["verify"] >= 0.002
    assert seconds["total"] >= seconds["draft"] + seconds["verify"]
