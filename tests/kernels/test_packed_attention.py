"""The reference kernels against loops over single queries in float64."""

from __future__ import annotations

import math

import pytest
import torch

from hf_dcut.kernels import band, decode_attention, prefill_attention

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
