"""Survival of drafted positions against a plain loop."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcut.scores import score
from hf_dcut.types import Batch, Drafts

# Devices round after every factor or once at the end: at most six half units in the last place, of one subnormal too.
ROUNDING = {"rel": 6 * 2.0**-24, "abs": 6 * 2.0**-149}
CONFIDENCE = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(0, 1, width=32))


def survival_by_loop(confidence: list[list[float]], count: list[int], room: list[int]) -> list[list[float]]:
    """Returns the products of equation 3; 0 where no draft may be kept."""
    out = []
    for row, real, fits in zip(confidence, count, room, strict=True):
        out.append([math.prod(row[: node + 1]) if node < min(real, fits) else 0.0 for node in range(len(row))])
    return out


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_equals_the_loop(make_batch: Callable[..., Batch], data: st.DataObject) -> None:
    rows, depth = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    places = st.lists(st.integers(0, depth + 2), min_size=rows, max_size=rows)
    confidence = data.draw(st.lists(st.lists(CONFIDENCE, min_size=depth, max_size=depth), min_size=rows, max_size=rows))
    count, room = [min(depth, n) for n in data.draw(places)], data.draw(places)
    drafts = Drafts.chain(torch.zeros(rows, depth, dtype=torch.int64), torch.tensor(confidence), torch.tensor(count))
    scores = score(drafts, make_batch([7] * rows, room))
    for row, expected in zip(scores.survival.tolist(), survival_by_loop(confidence, count, room), strict=True):
        assert row == pytest.approx(expected, **ROUNDING)
    assert scores.valid.tolist() == [[n < min(c, r) for n in range(depth)] for c, r in zip(count, room, strict=True)]
    assert (scores.survival.diff(dim=1) <= 0).all(), "the best positions would not form prefixes"


def score_row(make_batch: Callable[..., Batch], confidence: list[float], **options: list[int]) -> list[float]:
    drafts = Drafts.chain(torch.zeros(1, len(confidence), dtype=torch.int64), torch.tensor([confidence]))
    return score(drafts, make_batch([3], **options)).survival[0].tolist()


def test_confidences_beyond_0_and_1_are_clamped(make_batch: Callable[..., Batch]) -> None:
    assert score_row(make_batch, [1.5, 0.5, -0.25, 1.0]) == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_follows_a_non_finite_confidence_is_nan(make_batch: Callable[..., Batch], bad: float) -> None:
    first, *others = score_row(make_batch, [0.5, bad, 0.5])
    assert first == 0.5
    assert all(map(math.isnan, others))


def test_a_non_finite_confidence_beyond_the_room_does_not_count(make_batch: Callable[..., Batch]) -> None:
    assert score_row(make_batch, [0.5, math.nan], room=[1]) == [0.5, 0.0]


def test_half_precision_confidences_are_multiplied_in_float32(make_batch: Callable[..., Batch]) -> None:
    drafts = Drafts.chain(torch.zeros(1, 3, dtype=torch.int64), torch.full((1, 3), 0.75, dtype=torch.bfloat16))
    assert score(drafts, make_batch([3])).survival.tolist() == [[0.75, 0.5625, 0.421875]]
