"""The references against loops over single queries in float64, and the fused kernels against the reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_dcut.kernels import band, decode_attention, fork, packed_attention, prefill_attention

ULPS = 1e-12  # float64 sums of some tens of terms in another order


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cells: range, scaling: float) -> torch.Tensor:
    """Returns what one query [heads, dim] gathers from cells of K/V [kv heads, cells, dim]."""
    out, group = torch.zeros(query.shape[0], value.shape[-1], dtype=torch.float64), query.shape[0] // key.shape[0]
    for head in range(query.shape[0]):
        scores = [float(query[head] @ key[head // group, cell]) * scaling for cell in cells]
        weights = [math.exp(score - max(scores)) for score in scores]
        for weight, cell in zip(weights, cells, strict=True):
            out[head] += weight / sum(weights) * value[head // group, cell]
    return out


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_band(window: int | None) -> None:
    query_cell = torch.tensor([[0, 4], [7, 2]])
    mask = band(query_cell, 8, window, torch.float32)
    for index, cell in [((0, 0), 0), ((0, 1), 4), ((1, 0), 7), ((1, 1), 2)]:
        seen = [c <= cell and (window is None or cell - c < window) for c in range(8)]
        assert mask[index].eq(0).tolist() == seen
        assert mask[index].isneginf().tolist() == [not s for s in seen]


def test_fork() -> None:
    # A tree behind two cells: anchor, a, b, and c, which follows a.
    ancestors = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]).bool()
    mask = fork(torch.full((4,), 2), ancestors, 8, torch.float64)
    assert mask.dtype == torch.float64
    assert mask.eq(0).int().tolist() == [
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 1, 0, 0],
    ]
    assert (mask.eq(0) | mask.isneginf()).all()
    assert torch.equal(fork(torch.tensor([2, 2]), ancestors[:2], 4, torch.float64), mask[:2, :4]), "fewer cells"
    apart = fork(torch.tensor([[0], [5]]), ancestors[1:3, None], 8, torch.float64)
    assert apart.eq(0).int().tolist() == [[[1, 1, 0, 0, 0, 0, 0, 0]], [[1, 1, 1, 1, 1, 1, 0, 1]]]


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize("window", [None, 3])
def test_ragged_decoding(heads: tuple[int, int], window: int | None, poisoned_memory: None) -> None:
    torch.manual_seed(0)
    counts, lengths, width, reach, dim = [3, 1, 2], [5, 0, 8], 4, 12, 8
    query = torch.randn(sum(counts), heads[0], dim, dtype=torch.float64)
    key, value = torch.randn(2, 3, heads[1], reach, dim, dtype=torch.float64)
    start = [0, 3, 4]
    row = torch.tensor([[s + w if w < n else s for w in range(width)] for s, n in zip(start, counts, strict=True)])
    place = torch.tensor([[r, w] for r, n in enumerate(counts) for w in range(n)]).T
    mask = band(torch.tensor(lengths)[:, None] + torch.arange(width), reach, window, torch.float64)[:, None]
    out = decode_attention(query, key, value, row, (place[0], place[1]), mask, scaling=0.3)
    for packed, (r, w) in enumerate(place.T.tolist()):
        cell = lengths[r] + w
        cells = range(0 if window is None else max(0, cell - window + 1), cell + 1)
        assert torch.allclose(out[packed], attend(query[packed], key[r], value[r], cells, 0.3), rtol=ULPS, atol=ULPS)


@pytest.mark.parametrize(("first", "window"), [(0, None), (0, 2), (3, None), (3, 4)])
def test_prompt_pieces(first: int, window: int | None, poisoned_memory: None) -> None:
    torch.manual_seed(0)
    count, heads, kv_heads, dim = 5, 4, 2, 8
    query = torch.randn(count, heads, dim, dtype=torch.float64)
    key, value = torch.randn(2, kv_heads, first + count, dim, dtype=torch.float64)
    plain = first == 0 and window is None
    mask = None if plain else band(torch.arange(first, first + count), first + count, window, torch.float64)
    out = prefill_attention(query, key, value, mask, scaling=0.3)
    for row in range(count):
        cell = first + row
        cells = range(0 if window is None else max(0, cell - window + 1), cell + 1)
        assert torch.allclose(out[row], attend(query[row], key, value, cells, 0.3), rtol=ULPS, atol=ULPS)


# Rounding of inputs of size 1 to each dtype and, in 16 bits, of the weights between the two products.
ROUNDING = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Queries and cells in use of each request, with slots of 70 cells.
LAYOUTS = {
    "one request": ([3], [5]),
    "ragged": ([3, 1, 9, 2], [5, 1, 70, 33]),
    "a prompt among them": ([2, 40, 1], [17, 40, 64]),
}


@dataclass
class Problem:
    """A packed row over slots whose unused cells hold NaN."""

    layout: str
    dtype: torch.dtype = torch.float32
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        (self.counts, used), length = LAYOUTS[self.layout], 70
        generator = torch.Generator().manual_seed(0)
        rows, slots = sum(self.counts), len(used)
        shapes = [(rows, self.heads[0], self.dims[0])] + [(slots * length, self.heads[1], dim) for dim in self.dims]
        query, key, value = (torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes)
        for slot, cells in enumerate(used):
            key[slot * length + cells : (slot + 1) * length] = math.nan
            value[slot * length + cells : (slot + 1) * length] = math.nan
        bounds = ([0, *accumulate(self.counts)], [length * slot for slot in range(slots + 1)], used)
        self.states = [x.to(self.device) for x in (query, key, value)]
        self.bounds = [torch.tensor(x, dtype=torch.int32, device=self.device) for x in bounds]
        self.sizes = (max(self.counts), max(used))
        self.sinks = torch.randn(self.heads[0], generator=generator).to(self.device)

    def solve(self, path: str, **options: Any) -> torch.Tensor:
        """Returns the output of a path, in its dtype."""
        return packed_attention(*self.states, *self.bounds, *self.sizes, 0.3, path=path, **options)

    def expected(self, **options: Any) -> torch.Tensor:
        """Returns the reference's output in float64."""
        states = [x.double() for x in self.states]
        return packed_attention(*states, *self.bounds, *self.sizes, 0.3, path="reference", **options)

    def check(self, path: str, compare: dict[str, Any] | None = None, **options: Any) -> None:
        """Compares a path with the reference, both with `options`, the path with those of `compare` too."""
        found = self.solve(path, **options, **(compare or {}))
        assert found.dtype == self.dtype
        assert (found.double() - self.expected(**options)).abs().max() <= ROUNDING[self.dtype]

    def trees(self) -> torch.Tensor:
        """Returns ancestors of binary trees, bool [T, W]: node i follows node (i - 1) // 2."""
        related = torch.zeros(sum(self.counts), max(self.counts) + 1, dtype=torch.bool)
        row = 0
        for count in self.counts:
            for node in range(count):
                while node >= 0:
                    related[row, node] = True
                    node = (node - 1) // 2 if node else -1
                row += 1
        return related.to(self.device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 1, 4, 50])
def test_reference_equals_the_loop(layout: str, window: int | None) -> None:
    problem = Problem(layout)
    out, row = problem.expected(window=window), 0
    query, key, value = (x.double() for x in problem.states)
    for slot, (count, cells) in enumerate(zip(*LAYOUTS[layout], strict=True)):
        own = slice(70 * slot, 70 * slot + cells)
        for cell in range(cells - count, cells):
            seen = range(0 if window is None else max(0, cell - window + 1), cell + 1)
            expected = attend(query[row], key[own].transpose(0, 1), value[own].transpose(0, 1), seen, 0.3)
            assert torch.allclose(out[row], expected, rtol=ULPS, atol=ULPS)
            row += 1


def test_reference_with_cap_sinks_and_trees_by_hand() -> None:
    problem = Problem("one request", heads=(1, 1))
    query, key, value = (x.double()[:5, 0] for x in problem.states)
    out = problem.expected(softcap=2.0, sinks=problem.sinks, ancestors=problem.trees())
    for row, seen in enumerate([(0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 4)]):  # both drafts follow the anchor
        scores = [2.0 * math.tanh(float(query[row] @ key[cell]) * 0.3 / 2.0) for cell in seen]
        weights = [math.exp(score) for score in scores]
        total = sum(weights) + math.exp(problem.sinks.item())
        expected = sum(w / total * value[cell] for w, cell in zip(weights, seen, strict=True))
        assert torch.allclose(out[row, 0], expected, rtol=ULPS, atol=ULPS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("parts", [None, 3])
def test_triton(
    layout: str, window: int | None, parts: int | None, device: torch.device, poisoned_memory: None
) -> None:
    Problem(layout, device=device).check("triton", {"parts": parts}, window=window)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (5, 1)])
def test_triton_groups_and_dtypes(dtype: torch.dtype, heads: tuple[int, int], device: torch.device) -> None:
    Problem("ragged", dtype, heads, device=device).check("triton", window=30)


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 64), (128, 128), (192, 128), (256, 256), (8, 24)])
def test_triton_head_sizes(dims: tuple[int, int], device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        Problem("one request", dtype, (2, 1), dims, device).check("triton")


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize(("layout", "parts"), [("ragged", 1), ("ragged", 2), ("a prompt among them", 1)])
def test_triton_cap_sinks_and_trees(layout: str, parts: int, device: torch.device, poisoned_memory: None) -> None:
    problem = Problem(layout, device=device)
    split = {"parts": parts}
    problem.check("triton", split, softcap=0.5)
    problem.check("triton", split, sinks=problem.sinks, window=20)
    problem.check("triton", split, ancestors=problem.trees())
    problem.check("triton", split, softcap=1.5, sinks=problem.sinks, ancestors=problem.trees())


def test_triton_with_a_cap_far_below_the_scores(device: torch.device) -> None:
    problem = Problem("one request", device=device)
    problem.states[0] *= 1e4
    problem.check("triton", softcap=3.0)


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["varlen", "triton"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_gpu(path: str, layout: str, window: int | None, dtype: torch.dtype, device: torch.device) -> None:
    Problem(layout, dtype, (8, 2), (128, 128), device).check(path, window=window)


def test_can_be_traced(device: torch.device) -> None:
    problem = Problem("ragged", device=device)
    expected = problem.solve("triton", window=9, sinks=problem.sinks)
    compiled = torch.compile(
        lambda *given: packed_attention(*given, *problem.sizes, 0.3, 9, None, problem.sinks, path="triton"),
        fullgraph=True,
        backend="aot_eager",
    )
    assert torch.equal(compiled(*problem.states, *problem.bounds), expected)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (*problem.states, *problem.bounds)]
        out = packed_attention(*fake, *problem.sizes, 0.3, path="triton")
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    given = (*problem.states, *problem.bounds, *problem.sizes, 0.3, 9, None, problem.sinks, None, 2)
    torch.library.opcheck(torch.ops.hf_dcut.packed_attention, given)


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_trees_with_a_window_are_refused(path: str, device: torch.device) -> None:
    problem = Problem("one request")
    with pytest.raises(ValueError, match="ancestors and window=4"):
        problem.solve(path, window=4, ancestors=problem.trees())


def test_what_the_kernel_does_not_take(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"heads of 16 in torch.float64.*path='reference'"):
        Problem("one request", torch.float64).solve("triton")
    with pytest.raises(ValueError, match=r"heads of 320 in torch.float32.*up to 256"):
        Problem("one request", dims=(320, 16)).solve("triton")


@pytest.mark.parametrize("name", ["softcap", "sinks", "ancestors"])
def test_what_varlen_does_not_do(name: str) -> None:
    with pytest.raises(ValueError, match=f"does not do {name}: use path='triton'"):
        Problem("one request").solve("varlen", **{name: 1.0 if name == "softcap" else torch.ones(4)})
