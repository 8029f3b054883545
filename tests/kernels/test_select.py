"""The selector's torch twin against the stages, and the fused one against the twin: equal, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_dcut.kernels import Selected, select

Inputs = tuple[torch.Tensor, ...]
# Few values make ties, also between rows and depths; 0.9999999 makes products that round up or down.
TYING = st.sampled_from([0.0, 0.25, 0.5, 0.9999999403953552, 1.0])
CONFIDENCE = st.one_of(TYING, st.floats(0, 1, width=32))


def make_inputs(rows: int, depth: int, budgets: int, points: int, seed: int, ties: bool = False) -> Inputs:
    """Returns random inputs of `select`: some rows offer fewer drafts, some none."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    confidence = numbers(5, rows, depth) / 4 if ties else torch.rand(rows, depth, generator=generator)
    totals = rows + numbers(rows * depth + 1, budgets).sort().values
    curve = torch.stack(
        [rows + torch.arange(points) * (rows * depth / points), torch.rand(points, generator=generator)]
    )
    return (
        confidence,
        numbers(1000, rows, depth),
        *(numbers(high, rows) for high in (depth + 2, depth + 2, 1000, 64, 500, 9)),
        totals,
        curve.double() + 0.5,
        torch.rand(1, generator=generator).double() * 1.5,
    )


def assert_equal(found: Selected, expected: Selected) -> None:
    for name, a, b in zip(Selected._fields, found, expected, strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a.cpu(), b.cpu()), name


def fused(inputs: Inputs, device: torch.device) -> Selected:
    return select(*(x.to(device) for x in inputs), path="triton")


def cost(total: int, points: list[float], seconds: list[float]) -> float:
    """Returns seconds between the points by hand."""
    if total <= points[0]:
        return seconds[0]
    for k in range(1, len(points)):
        if total <= points[k]:
            share = (total - points[k - 1]) / (points[k] - points[k - 1])
            return seconds[k - 1] + share * (seconds[k] - seconds[k - 1])
    return seconds[-2] + (seconds[-1] - seconds[-2]) if len(points) > 1 else seconds[-1]


def by_loop(inputs: Inputs) -> dict[str, Any]:
    """Returns what `select` must say, from plain Python: sort all drafts, weigh each budget, lay the row out."""
    confidence, token, count, room, anchor, slot, length, rope, budgets, (points, seconds), (belief,) = (
        x.tolist() for x in inputs
    )
    rows, depth = len(token), len(token[0])
    offered = [max(0, min(c, r, depth)) for c, r in zip(count, room, strict=True)]
    places = []
    for i in range(rows):
        product = 1.0
        for k in range(offered[i]):
            product *= confidence[i][k]
            survival = torch.tensor(product, dtype=torch.float64).float().item()
            places.append((-survival, k, i))
    places.sort()

    rates, totals = [], [min(t, rows + len(places)) for t in budgets]
    for total in totals:
        gain = sum(int(-s * 2**40) for s, _, _ in places[: total - rows]) / 2**40
        rates.append((rows + belief * gain) / cost(total, points, seconds))
    best = rates.index(max(rates))
    kept = [0] * rows
    for _, _, i in places[: totals[best] - rows]:
        kept[i] += 1
    columns = []
    for i in range(rows):
        for k, own in enumerate([anchor[i], *token[i][: kept[i]]]):
            columns.append([own, slot[i], length[i] + k, length[i] + k + rope[i], k - 1])
    promised = sum(int(-s * 2**40) for s, _, _ in places[: totals[best] - rows])
    return {
        "promised": promised,
        "best": best,
        "total": totals[best],
        "offered": offered,
        "kept": kept,
        "columns": columns,
    }


def assert_as_by_loop(found: Selected, inputs: Inputs) -> None:
    expected, length = by_loop(inputs), inputs[6].tolist()
    best, total, finite, promised, *offered = found.numbers.tolist()
    assert promised == expected["promised"]
    assert (best, total, bool(finite), offered) == (expected["best"], expected["total"], True, expected["offered"])
    assert found.columns[:5, :total].T.tolist() == expected["columns"]
    assert found.columns[5].tolist() == list(range(found.columns.shape[1]))
    spare = found.columns[:5, total:].T.tolist()
    anchor = [int(inputs[4][-1]), int(inputs[5][-1]), length[-1], length[-1] + int(inputs[7][-1]), -1]
    assert spare == [anchor] * len(spare)
    kept = expected["kept"]
    depth = inputs[0].shape[1]
    assert found.keep.tolist() == [[k < n for k in range(depth)] for n in kept]
    assert found.start.tolist() == [sum(kept[:i]) + i for i in range(len(kept) + 1)]
    assert found.used.tolist() == [n + k + 1 for n, k in zip(length, kept, strict=True)]


def draw_inputs(data: st.DataObject, confidence: st.SearchStrategy[float], most: int) -> Inputs:
    rows, depth = data.draw(st.integers(1, most), "B"), data.draw(st.integers(1, most), "D")
    seed, budgets, points = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    row = st.lists(confidence, min_size=depth, max_size=depth)
    values = torch.tensor(data.draw(st.lists(row, min_size=rows, max_size=rows), "confidence"))
    return (values, *make_inputs(rows, depth, budgets, points, seed)[1:])


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_reference_equals_the_loop(data: st.DataObject) -> None:
    inputs = draw_inputs(data, CONFIDENCE, most=6)
    assert_as_by_loop(select(*inputs, path="reference"), inputs)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_fused_equals_reference(device: torch.device, data: st.DataObject) -> None:
    inputs = draw_inputs(data, CONFIDENCE, most=6)
    assert_equal(fused(inputs, device), select(*inputs, path="reference"))


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_fused_equals_reference_with_ties(device: torch.device, data: st.DataObject) -> None:
    inputs = draw_inputs(data, TYING, most=5)
    assert_equal(fused(inputs, device), select(*inputs, path="reference"))


@pytest.mark.parametrize(
    ("rows", "depth", "budgets", "points"),
    [(1, 1, 1, 1), (1, 31, 4, 2), (64, 5, 4, 5), (33, 7, 9, 3), (256, 2, 2, 4), (200, 1, 3, 2), (5, 15, 4, 4)],
)
@pytest.mark.parametrize("ties", [False, True])
def test_sizes(
    rows: int, depth: int, budgets: int, points: int, ties: bool, device: torch.device, poisoned_memory: None
) -> None:
    inputs = make_inputs(rows, depth, budgets, points, seed=rows + depth, ties=ties)
    assert_equal(fused(inputs, device), select(*inputs, path="reference"))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 255, 256])
@pytest.mark.parametrize("depth", [15, 30, 31])
@pytest.mark.parametrize("ties", [False, True])
def test_large_sizes(rows: int, depth: int, ties: bool, device: torch.device, poisoned_memory: None) -> None:
    inputs = make_inputs(rows, depth, 8, 6, seed=depth, ties=ties)
    assert_equal(fused(inputs, device), select(*inputs, path="reference"))


@pytest.mark.parametrize("path", ["reference", "triton"])
class TestEither:
    def select(self, inputs: Inputs, path: str, device: torch.device) -> Selected:
        return fused(inputs, device) if path == "triton" else select(*inputs, path=path)

    def test_nobody_offers_a_draft(self, path: str, device: torch.device, poisoned_memory: None) -> None:
        inputs = list(make_inputs(3, 4, 2, 2, seed=1))
        inputs[2] = torch.tensor([0, 3, 4])
        inputs[3] = torch.tensor([5, 0, -1])  # a request past its end has no room
        found = self.select(tuple(inputs), path, device)
        assert found.numbers.tolist() == [0, 3, 1, 0, 0, 0, 0]
        assert found.start.tolist() == [0, 1, 2, 3]
        assert not found.keep.any()

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_what_cannot_be_ranked_is_told(self, path: str, bad: float, device: torch.device) -> None:
        inputs = list(make_inputs(3, 4, 2, 2, seed=2))
        inputs[2] = inputs[3] = torch.tensor([4, 2, 4])
        inputs[0][1, 2] = bad
        assert self.select(tuple(inputs), path, device).numbers[2] == 1, "beyond what the row offers"
        inputs[0][2, 3] = bad
        assert self.select(tuple(inputs), path, device).numbers[2] == 0

    def test_slices_of_longer_blocks(self, path: str, device: torch.device) -> None:
        confidence, token, *others = make_inputs(4, 6, 3, 2, seed=3)
        cut = (confidence[:, :3], token[:, :3], *others)
        whole = (confidence[:, :3].contiguous(), token[:, :3].contiguous(), *others)
        assert_equal(self.select(cut, path, device), select(*whole, path="reference"))

    def test_half_precision_confidences(self, path: str, device: torch.device) -> None:
        confidence, *others = make_inputs(4, 6, 3, 2, seed=4)
        half = confidence.bfloat16()
        found = self.select((half, *others), path, device)
        assert_equal(found, select(half.float(), *others, path="reference"))

    def test_compiles_whole(self, path: str, device: torch.device) -> None:
        inputs = make_inputs(3, 4, 2, 3, seed=5)
        compiled = torch.compile(lambda *given: select(*given, path=path), fullgraph=True, backend="aot_eager")
        assert_equal(compiled(*(x.to(device) for x in inputs)), select(*inputs, path="reference"))

    def test_fake_tensors(self, path: str, device: torch.device) -> None:
        inputs = make_inputs(3, 4, 2, 3, seed=5)
        real = select(*inputs, path="reference")
        with FakeTensorMode() as mode:
            fake = select(*(mode.from_tensor(x) for x in inputs), path=path)
        for name, a, b in zip(Selected._fields, fake, real, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), name


@pytest.mark.parametrize(("rows", "depth"), [(257, 2), (2, 32)])
def test_more_than_the_kernel_takes(rows: int, depth: int, device: torch.device) -> None:
    inputs = make_inputs(rows, depth, 1, 1, seed=0)
    with pytest.raises(ValueError, match=f"{rows} requests of {depth} drafts.*1 to 256 of 1 to 31.*path='reference'"):
        fused(inputs, device)


def test_the_op_is_what_it_claims(device: torch.device) -> None:
    inputs = tuple(x.to(device) for x in make_inputs(3, 4, 2, 3, seed=5))
    select(*inputs, path="triton")
    torch.library.opcheck(torch.ops.hf_dcut.select, inputs)
