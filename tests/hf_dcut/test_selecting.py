"""Selection in one call against the three stages: the same packed row and cut, and the same refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from hf_dcut.budget import NonFiniteScores, cut, positions
from hf_dcut.cost_table import CostTable
from hf_dcut.packing import pack
from hf_dcut.scores import score
from hf_dcut.selecting import choose_fixed, menu_of, select, select_at_once, select_fixed
from hf_dcut.types import Batch, Cut, Drafts, Packed, Scores

RATIOS = (0.25, 0.5, 0.75, 1.0)


def by_stages(
    drafts: Drafts, batch: Batch, ratios: tuple[float, ...], costs: CostTable | None, belief: float = 1.0
) -> tuple[Packed, Cut]:
    chosen = cut(score(drafts, batch), ratios, costs.drafted if costs else None, belief)
    return pack(drafts, chosen, batch, reach=99), chosen


def assert_same(found: object, expected: object) -> None:
    for field in fields(expected):  # type: ignore[arg-type]
        a, b = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(b, torch.Tensor):
            assert a.dtype == b.dtype, field.name
            assert torch.equal(a, b), field.name
        else:
            assert a == b, field.name


def draw_request(data: st.DataObject, make_batch: Callable[..., Batch]) -> tuple[Drafts, Batch]:
    rows, depth = data.draw(st.integers(1, 5), "B"), data.draw(st.integers(1, 5), "D")
    value = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1, width=32))
    numbers = st.lists(st.integers(0, depth + 1), min_size=rows, max_size=rows)
    confidence = data.draw(st.lists(st.lists(value, min_size=depth, max_size=depth), min_size=rows, max_size=rows))
    token = torch.arange(rows * depth).view(rows, depth)
    drafts = Drafts.chain(token, torch.tensor(confidence), torch.tensor(data.draw(numbers, "count")).clamp_max(depth))
    return drafts, make_batch(data.draw(numbers, "length"), data.draw(numbers, "room"), rope=[3] * rows)


@pytest.mark.parametrize(("path", "examples"), [("reference", 100), ("triton", 25)])
def test_equals_the_stages(make_batch: Callable[..., Batch], path: str, examples: int) -> None:
    if path == "triton":
        pytest.importorskip("triton")

    @settings(deadline=None, max_examples=examples)
    @given(st.data(), st.lists(st.floats(0.5, 4.0), min_size=4, max_size=4), st.sampled_from([1, 2, 4, 8]))
    def check(data: st.DataObject, seconds: list[float], measured: int) -> None:
        drafts, batch = draw_request(data, make_batch)
        whole = measured * (drafts.token.shape[1] + 1)
        points = sorted({max(measured, round(whole * ratio)) for ratio in RATIOS})
        costs = CostTable.from_rows({measured: dict(zip(points, seconds, strict=False))}, drafts.token.shape[1])
        ratios = data.draw(st.sampled_from([RATIOS, (0.5,), (1.0,), (0.1, 0.3, 0.9)]))
        belief = data.draw(st.sampled_from([1.0, 0.3, 1.7]))
        found = select_at_once(drafts, batch, ratios, costs, 99, belief, path)
        for a, b in zip(found, by_stages(drafts, batch, ratios, costs, belief), strict=True):
            assert_same(a, b)

    check()


@pytest.mark.parametrize(("path", "examples"), [("reference", 150), ("triton", 20)])
def test_the_best_of_fixed_budgets_is_that_of_the_stages(
    make_batch: Callable[..., Batch], path: str, examples: int
) -> None:
    """Whatever rows are spare behind the requests."""
    if path == "triton":
        pytest.importorskip("triton")

    @settings(deadline=None, max_examples=examples)
    @given(st.data(), st.lists(st.floats(0.5, 4.0), min_size=4, max_size=4), st.integers(0, 3))
    def check(data: st.DataObject, seconds: list[float], spare: int) -> None:
        drafts, batch = draw_request(data, make_batch)
        (rows, depth), belief = drafts.token.shape, data.draw(st.sampled_from([1.0, 0.3, 1.7]))
        totals = [positions(ratio, rows, depth) for ratio in RATIOS]
        costs = CostTable.from_rows({rows: dict(zip(totals, seconds, strict=True))}, depth)
        menu = menu_of(RATIOS, costs, rows, rows + spare, depth, belief)
        filled = Drafts.chain(*(F.pad(x, (0, 0, 0, spare)) for x in (drafts.token, drafts.confidence)))
        filled = replace(filled, count=F.pad(drafts.count, (0, spare), value=depth))
        columns = [F.pad(getattr(batch, name), (0, spare)) for name in ("slot", "length", "anchor", "room", "seed")]
        best = choose_fixed(filled, Batch(*columns, F.pad(batch.rope, (0, spare))), menu, path)
        (_, chosen), scores = by_stages(drafts, batch, RATIOS, costs, belief), score(drafts, batch)
        # Two rates that differ in the last bit may change places where rows are spare.
        rates = {r: _rate(scores, r, costs, belief) for r in (RATIOS[int(best)], chosen.budget)}
        assert best.shape == (1,)
        assert RATIOS[int(best)] == chosen.budget or (spare and math.isclose(*rates.values(), rel_tol=1e-12))

    check()


def _rate(scores: Scores, ratio: float, costs: CostTable, belief: float) -> float:
    chosen, rows = cut(scores, (ratio,)), len(scores.valid)
    return (rows + belief * chosen.promised) / costs.drafted(rows, chosen.total)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_drafts_that_cannot_be_ranked_count_as_failing(make_batch: Callable[..., Batch], bad: float) -> None:
    drafts = Drafts.chain(torch.ones(2, 3).long(), torch.tensor([[bad] * 3, [1.0] * 3]))
    costs = CostTable.from_rows({2: {2: 1.0, 4: 1.1, 6: 1.2, 8: 1.3}}, 3)
    menu = menu_of(RATIOS, costs, 2, 2, 3)
    # Three good drafts: six places hold them and one that fails.
    assert choose_fixed(drafts, make_batch([4, 5]), menu).tolist() == [2]


def test_the_costs_are_those_of_the_length_of_the_texts(make_batch: Callable[..., Batch]) -> None:
    """Where texts are short, eight positions cost no more than two; where they are long, four times as much."""
    costs = CostTable(3)
    costs.seconds = {16: {2: {2: 1.0, 8: 1.0}}, 1024: {2: {2: 1.0, 8: 4.0}}}
    drafts = Drafts.chain(torch.zeros(2, 3, dtype=torch.int64), torch.full((2, 3), 0.5))
    batch = make_batch([4, 5], [9, 9])
    for reach, total in ((20, 8), (900, 2)):
        for choose in (select, select_at_once):
            packed, chosen = choose(drafts, batch, (0.25, 1.0), costs, reach)
            assert (len(packed), chosen.total) == (total, total)
        menu = menu_of((0.25, 1.0), costs, 2, 2, 3, kv_length=reach)
        assert (0.25, 1.0)[int(choose_fixed(drafts, batch, menu))] == (1.0 if total == 8 else 0.25)


def test_a_fixed_budget_needs_no_costs(make_batch: Callable[..., Batch]) -> None:
    drafts, batch = Drafts.chain(torch.ones(2, 3).long(), torch.ones(2, 3)), make_batch([4, 5])
    for a, b in zip(
        select_at_once(drafts, batch, (0.5,), None, 99), by_stages(drafts, batch, (0.5,), None), strict=True
    ):
        assert_same(a, b)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_cannot_be_ranked_is_refused(make_batch: Callable[..., Batch], bad: float) -> None:
    drafts = Drafts.chain(torch.ones(2, 3).long(), torch.tensor([[0.5, bad, 0.5], [0.5] * 3]))
    with pytest.raises(NonFiniteScores, match="not finite"):
        select_at_once(drafts, make_batch([4, 5]), (0.5,), None, 99)


@pytest.mark.parametrize(("path", "examples"), [("reference", 100), ("triton", 15)])
def test_a_given_number_of_places_is_filled_with_the_best_drafts_and_then_the_others(
    make_batch: Callable[..., Batch], path: str, examples: int
) -> None:
    if path == "triton":
        pytest.importorskip("triton")

    @settings(deadline=None, max_examples=examples)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        drafts, batch = draw_request(data, make_batch)
        # Real drafts that are certain to fail are worth no more than those that are not there.
        drafts = replace(drafts, confidence=drafts.confidence.clamp_min(0.01))
        rows, depth = drafts.token.shape
        total = data.draw(st.integers(rows, rows * (depth + 1)), "T")
        packed = select_fixed(drafts, batch, total, 99, path)
        exact, _ = by_stages(drafts, batch, (total / (rows * (depth + 1)),), None)
        kept, wanted = packed.start.diff() - 1, exact.start.diff() - 1
        assert (len(packed), int(packed.start[-1]), packed.fixed) == (total, total, True)
        if len(exact) == total:
            assert_same(packed, replace(exact, fixed=True))
        # Fewer real drafts than places: all of them are there, in front.
        assert (kept >= wanted).all()
        assert (kept <= depth).all()
        row = torch.repeat_interleave(torch.arange(rows), kept + 1)
        assert torch.equal(packed.slot, row)
        assert torch.equal(packed.cell, batch.length[row] + packed.node + 1)
        assert torch.equal(packed.token, torch.cat([batch.anchor[:, None], drafts.token], 1)[row, packed.node + 1])
        last = batch.length + batch.room + batch.rope
        assert torch.equal(packed.position, torch.minimum(packed.cell + batch.rope[row], last[row]))

    check()


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_cannot_be_ranked_fills_places_last(make_batch: Callable[..., Batch], bad: float, path: str) -> None:
    if path == "triton":
        pytest.importorskip("triton")
    drafts = Drafts.chain(torch.arange(6).view(2, 3), torch.tensor([[bad, 1.0, 1.0], [0.1] * 3]))
    sizes = [select_fixed(drafts, make_batch([4, 5]), total, 99, path).start.diff().tolist() for total in (2, 5, 8)]
    assert sizes == [[1, 1], [1, 4], [4, 4]]
