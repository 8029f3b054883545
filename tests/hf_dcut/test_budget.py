"""The cut against a search over all prefix cuts, and the paper's own cost table."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcut.budget import NonFiniteScores, cut, positions
from hf_dcut.cost_table import CostTable
from hf_dcut.types import Cut, Scores

DYADIC = (0.0, 0.25, 0.5, 0.75, 1.0)  # products of four are exact in float32, and so are sums of twelve of those
RATIOS = (0.25, 0.5, 0.75, 1.0)

# Milliseconds of a step on two GPUs, by batch size, at the four ratios (the paper's table 3, D = 15).
PAPER = {
    "H20": {
        1: (7.180, 7.157, 7.310, 7.353),
        8: (10.364, 12.775, 16.454, 19.663),
        16: (15.991, 22.785, 30.003, 35.869),
        32: (29.903, 43.000, 56.611, 70.066),
        64: (55.162, 82.287, 107.874, 133.914),
    },
    "H800": {
        1: (7.995, 8.008, 8.081, 8.101),
        8: (8.363, 8.457, 8.657, 8.628),
        16: (9.008, 9.079, 9.700, 10.208),
        32: (10.408, 11.554, 13.793, 15.926),
        64: (14.464, 18.904, 24.317, 30.388),
    },
}


def make_scores(confidence: list[list[float]], offered: list[int]) -> Scores:
    """Returns the survivals of rows that offer so many drafts each, multiplied in float32 one by one."""
    rows, valid = [], []
    for row, count in zip(confidence, offered, strict=True):
        running, survival = torch.tensor(1.0), []
        for node, c in enumerate(row):
            running = running * c if node < count else torch.tensor(0.0)
            survival.append(running.item())
        rows.append(survival)
        valid.append([node < count for node in range(len(row))])
    return Scores(torch.tensor(rows), torch.tensor(valid))


def best_sum(scores: Scores, drafts: int) -> float:
    """Returns the largest sum of survivals that any choice of one prefix a row with `drafts` drafts in all has."""
    rows, offered = scores.survival.tolist(), scores.valid.sum(1).tolist()
    choices = product(*(range(count + 1) for count in offered))
    return max(
        math.fsum(s for row, n in zip(rows, kept, strict=True) for s in row[:n])
        for kept in choices
        if sum(kept) == drafts
    )


def kept_sum(scores: Scores, chosen: Cut) -> float:
    return math.fsum(scores.survival[chosen.keep].tolist())


def draw_scores(data: st.DataObject, confidence: st.SearchStrategy[float]) -> Scores:
    rows, depth = data.draw(st.integers(1, 3), "B"), data.draw(st.integers(1, 4), "D")
    row = st.lists(confidence, min_size=depth, max_size=depth)
    values = data.draw(st.lists(row, min_size=rows, max_size=rows), "confidence")
    return make_scores(values, data.draw(st.lists(st.integers(0, depth), min_size=rows, max_size=rows), "offered"))


ANY_CONFIDENCE = st.one_of(st.sampled_from(DYADIC), st.floats(0, 1, width=32))


@settings(deadline=None, max_examples=200)
@given(st.data(), st.floats(0.01, 1.0))
def test_keeps_the_best_prefixes_and_exactly_the_budget(data: st.DataObject, ratio: float) -> None:
    scores = draw_scores(data, ANY_CONFIDENCE)
    rows, depth = scores.survival.shape
    offered = scores.valid.sum(1).tolist()
    chosen = cut(scores, (ratio,))
    kept = chosen.keep.sum(1).tolist()
    assert chosen.total == min(positions(ratio, rows, depth), rows + sum(offered)) == rows + sum(kept)
    assert chosen.offered == tuple(offered)
    assert chosen.budget == ratio
    for row, count, most in zip(chosen.keep.tolist(), kept, offered, strict=True):
        assert count <= most
        assert row == [True] * count + [False] * (depth - count)
    assert kept_sum(scores, chosen) == best_sum(scores, sum(kept))


@settings(deadline=None, max_examples=100)
@given(st.data(), st.floats(0.01, 1.0))
def test_does_not_depend_on_the_order_of_rows(data: st.DataObject, ratio: float) -> None:
    scores = draw_scores(data, ANY_CONFIDENCE)
    order = data.draw(st.permutations(range(len(scores.survival))))
    here, there = cut(scores, (ratio,)), cut(Scores(scores.survival[order], scores.valid[order]), (ratio,))
    survivals = scores.survival[scores.valid].tolist()
    assert here.total == there.total
    if len(set(survivals)) == len(survivals):
        assert here.keep[order].tolist() == there.keep.tolist()
    # With ties another row of the same survival may be kept, never a worse one.
    assert sorted(scores.survival[here.keep].tolist()) == sorted(scores.survival[order][there.keep].tolist())


@settings(deadline=None, max_examples=100)
@given(st.data(), st.lists(st.floats(0.5, 4.0), min_size=13, max_size=13))
def test_auto_picks_the_most_expected_tokens_per_second(data: st.DataObject, seconds: list[float]) -> None:
    scores = draw_scores(data, st.sampled_from(DYADIC))
    rows, depth = scores.survival.shape
    drafts = int(scores.valid.sum())
    rates = {}
    for ratio in RATIOS:
        total = min(max(rows, math.ceil(Fraction(ratio) * rows * (depth + 1))), rows + drafts)
        rates[ratio] = (rows + best_sum(scores, total - rows)) / seconds[total - rows]
    chosen = cut(scores, RATIOS, lambda requests, total: seconds[total - requests])
    assert rates[chosen.budget] == max(rates.values())
    assert chosen.budget == min(r for r in RATIOS if rates[r] == max(rates.values())), (
        "a tie goes to the smaller budget"
    )
    assert kept_sum(scores, chosen) == best_sum(scores, chosen.total - rows)


@pytest.mark.parametrize(
    ("gpu", "requests", "confidence", "expected"),
    [("H20", 64, 0.75, 0.25), ("H800", 64, 0.75, 0.5), ("H20", 32, 0.9, 0.5), ("H800", 32, 0.9, 0.75)],
)
def test_chooses_as_the_papers_cost_table_says(gpu: str, requests: int, confidence: float, expected: float) -> None:
    rows = {
        b: {round(r * b * 16): ms / 1e3 for r, ms in zip(RATIOS, row, strict=True)} for b, row in PAPER[gpu].items()
    }
    scores = make_scores([[confidence] * 15] * requests, [15] * requests)
    chosen = cut(scores, RATIOS, CostTable.from_rows(rows, draft_tokens=15).drafted)
    assert chosen.budget == expected
    assert chosen.total == expected * requests * 16


def test_a_sure_request_takes_the_drafts_of_an_unsure_one() -> None:
    chosen = cut(make_scores([[0.0] * 4, [1.0] * 4], [4, 4]), (0.6,))
    assert chosen.keep.sum(1).tolist() == [0, 4]


def test_ties_go_shallow_first_then_by_request() -> None:
    chosen = cut(make_scores([[1.0] * 3] * 3, [3, 3, 3]), (7 / 12,))
    assert chosen.keep.sum(1).tolist() == [2, 1, 1]


def test_rows_that_offer_less_leave_their_share_to_others() -> None:
    chosen = cut(make_scores([[0.5] * 4, [0.5] * 4], [1, 4]), (0.8,))
    assert (chosen.keep.sum(1).tolist(), chosen.total) == ([1, 4], 7)


def test_nothing_offered_keeps_the_anchors() -> None:
    chosen = cut(make_scores([[0.5] * 4, [0.5] * 4], [0, 0]), (1.0,))
    assert (chosen.keep.any().item(), chosen.total, chosen.offered) == (False, 2, (0, 0))


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 100), st.integers(1, 100), st.integers(1, 64), st.integers(1, 31))
def test_positions_round_up_exactly(part: int, whole: int, requests: int, depth: int) -> None:
    share = Fraction(min(part, whole), whole)
    assert positions(float(share), requests, depth) == max(requests, math.ceil(share * requests * (depth + 1)))


def test_positions_by_hand() -> None:
    assert math.ceil(0.1 * 3 * 10) == 4, "the share is 3 exactly; the floating-point product a hair above"
    assert positions(0.1, 3, 9) == 3
    assert positions(0.26, 1, 15) == 5
    assert positions(0.01, 8, 15) == 8
    assert positions(1.0, 3, 4) == 15


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("ratios", [(0.5,), RATIOS])
def test_what_cannot_be_ranked_is_refused(bad: float, ratios: tuple[float, ...]) -> None:
    scores = make_scores([[0.5] * 3, [0.5] * 3], [3, 3])
    scores.survival[1, 2] = bad
    with pytest.raises(NonFiniteScores, match="not finite"):
        cut(scores, ratios, lambda requests, total: 1.0)


def test_nan_beyond_what_is_offered_does_not_count() -> None:
    scores = make_scores([[0.5] * 3, [0.5] * 3], [3, 1])
    scores.survival[1, 1:] = math.nan
    assert cut(scores, (1.0,)).keep.sum(1).tolist() == [3, 1]


def test_what_is_kept_promises_its_survivals_and_belief_only_chooses_the_budget() -> None:
    scores = make_scores([[0.5, 0.5, 0.5]], [3])
    costs = CostTable.from_rows({1: {0: 1.0, 1: 1.0, 2: 1.25, 3: 1.5, 4: 1.75}}, 3)
    believed = cut(scores, (0.25, 0.5, 0.75, 1.0), costs.drafted)
    doubted = cut(scores, (0.25, 0.5, 0.75, 1.0), costs.drafted, belief=0.25)
    assert (believed.budget, believed.promised) == (0.5, 0.5)  # 1.5 / 1.25 beats 1, 1.75 / 1.5 and 1.875 / 1.75
    assert (doubted.budget, doubted.promised) == (0.25, 0.0)  # 1.125 / 1.25 does not beat 1
    assert cut(scores, (0.75,), belief=0.0).promised == 0.75
