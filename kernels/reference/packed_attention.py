"""Attention of a packed ragged row over slots: the path of every device until a fused kernel takes over.

Only here are the queries padded, and only those of decoding requests, which have at most D+1 rows each; the target's
matrix products all run on the packed row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, row: Tensor, place: tuple[Tensor, Tensor], mask: Tensor, scaling: float
) -> Tensor:
    """Returns the attention output [n, heads, dim] of n packed rows of requests in slots 0 .. R-1.

    Args:
        query: [T, heads, dim], all packed rows.
        key, value: [R, kv heads, reach, dim], the slots' cells.
        row: int64 [R, W], packed row of each request's w-th query; places past its last repeat its first.
        place: request and offset of the n rows wanted, int64 [n] each.
        mask: [R, 1, W, reach], 0 where a query may look and -inf elsewhere.
        scaling: factor of the scores.
    """
    padded = query[row].transpose(1, 2)
    out = F.scaled_dot_product_attention(padded, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2)[place]


def prefill_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Returns the attention output [n, heads, dim] of n prompt tokens of one request over its own cells.

    Args:
        query: [n, heads, dim].
        key, value: [kv heads, cells, dim].
        mask: [n, cells], 0 or -inf; None when the prompt begins here, so that plain causality says the same.
        scaling: factor of the scores.
    """
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key[None],
        value[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def band(query_cell: Tensor, cells: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Returns 0 where a query may look and -inf elsewhere, [*query_cell.shape, cells].

    A query sees the cells up to its own, with a window only the last `window` of them.

    Args:
        query_cell: int64, cell of each query.
        cells: how many cells there are.
        window: width of a sliding layer; None on full layers.
        dtype: of the result.
    """
    cell = torch.arange(cells, device=query_cell.device)
    seen = cell <= query_cell[..., None]
    if window is not None:
        seen &= cell > query_cell[..., None] - window
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
