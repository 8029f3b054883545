"""Attention of a packed ragged row over slots.

`packed_attention` is the truth: request by request, with everything the fused kernels can do. `decode_attention` and
`prefill_attention` are what runs where those cannot, on torch's SDPA. Only there are queries padded, and only those of
decoding requests, which have at most D+1 rows each; the target's matrix products all run on the packed row.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Formula(NamedTuple):
    """What a layer makes of its scores, as the kernels take it: factor, window, soft cap, a sink for each head."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: Tensor,
    begin: Tensor,
    used: Tensor,
    width: int,
    reach: int,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    ancestors: Tensor | None = None,
) -> Tensor:
    """Returns the attention output [T, heads, value dim] of R requests, computed in float32 or better.

    The rows of a request are its last ones: row i of n has cell used - n + i and sees the cells up to its own. Reads
    the bounds on the host.

    Args:
        query: [T, heads, dim], the requests one behind the other.
        key, value: [cells, kv heads, dim] of all slots, as one long row.
        start: int32 [R+1], where each request's queries begin.
        begin: int32 [R+1], where its slot begins in the long row; the last entry is not used.
        used: int32 [R], its cells that hold K/V.
        width: most queries of one request.
        reach: most cells of one request.
        scaling: factor of the scores.
        window: a query sees only this many cells, its own included; None for all.
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: [heads], a score a head that takes part in the softmax and has no value.
        ancestors: bool [T, >= width], which rows of its own request a query sees, instead of all up to itself.

    Raises:
        ValueError: ancestors with a window.
    """
    check(window, ancestors)
    wide = torch.promote_types(query.dtype, torch.float32)
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    bounds = start.tolist()
    for (first, end), slot, cells in zip(pairwise(bounds), begin.tolist(), used.tolist(), strict=False):
        rows, past = end - first, cells - (end - first)
        own, kv = slice(first, end), slice(slot, slot + cells)
        keys, values = key[kv].to(wide), value[kv].to(wide)
        queries = query[own].to(wide).unflatten(1, (keys.shape[1], -1))
        scores = torch.einsum("qkgd,ckd->kgqc", queries, keys) * scaling
        mask = band(torch.arange(past, cells, device=query.device), cells, window, wide)
        if ancestors is not None:
            mask[:, past:] = torch.zeros_like(mask[:, past:]).masked_fill_(~ancestors[own, :rows], -torch.inf)
        weights = _weights(scores, mask, softcap, sinks)
        out[own] = torch.einsum("kgqc,ckd->qkgd", weights, values).flatten(1, 2).to(out.dtype)
    return out


def _weights(scores: Tensor, mask: Tensor, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Returns the weight of each cell, as the scores [..., kv heads, group, queries, cells]; a sink's share is lost."""
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores + mask
    if sinks is None:
        return scores.softmax(dim=-1)
    sink = sinks.to(scores.dtype).view(*scores.shape[-4:-2], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]


def check(window: int | None, ancestors: Tensor | None) -> None:
    """Raises ValueError for what no path of `packed_attention` does."""
    if window is not None and ancestors is not None:
        raise ValueError(
            f"packed attention got ancestors and window={window}: siblings of a tree share a position, which a window "
            "counted in cells does not know. Use one of them"
        )


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: Tensor | None,
    place: tuple[Tensor, Tensor] | None,
    mask: Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns the attention output [n, heads, dim] of n packed rows of requests in slots 0 .. R-1.

    Where all requests have equally many rows, neither `row` nor `place` is needed: the packed rows are the padded ones.

    Args:
        query: [T, heads, dim], all packed rows.
        key, value: [R, kv heads, reach, dim], the slots' cells.
        row: int64 [R, W], packed row of each request's w-th query; places past its last repeat its first.
        place: request and offset of the n rows wanted, int64 [n] each.
        mask: [R, 1, W, reach], 0 where a query may look and -inf elsewhere.
        scaling, softcap, sinks: as for `packed_attention`.
    """
    padded = query.unflatten(0, (len(key), -1)) if row is None else query[row]
    out = _attend(padded.transpose(1, 2), key, value, mask, scaling, softcap, sinks).transpose(1, 2)
    return out.flatten(0, 1) if place is None else out[place]


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns the attention output [n, heads, dim] of n prompt tokens of one request over its own cells.

    Args:
        query: [n, heads, dim].
        key, value: [kv heads, cells, dim].
        mask: [n, cells], 0 or -inf; None when the prompt begins here, so that plain causality says the same.
        scaling, softcap, sinks: as for `packed_attention`.
    """
    batch = query.transpose(0, 1)[None], key[None], value[None]
    return _attend(*batch, mask, scaling, softcap, sinks)[0].transpose(0, 1)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Returns the attention output [R, heads, n, value dim], query [R, heads, n, dim], K/V [R, kv heads, cells, dim].

    By torch's SDPA, but for soft caps and sinks, which it lacks: these are computed in float32 or better.
    """
    if softcap is None and sinks is None:
        if mask is None:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return _attend_by_group(query, key, value, mask, scaling)
    wide = torch.promote_types(query.dtype, torch.float32)
    if mask is None:
        mask = band(torch.arange(key.shape[2], device=key.device), key.shape[2], None, wide)
    else:
        mask = mask.unsqueeze(2) if mask.dim() == 4 else mask
    grouped = query.to(wide).unflatten(1, (key.shape[1], -1))
    scores = torch.einsum("rkgqd,rkcd->rkgqc", grouped, key.to(wide)) * scaling
    out = torch.einsum("rkgqc,rkcd->rkgqd", _weights(scores, mask, softcap, sinks), value.to(wide))
    return out.flatten(1, 2).to(query.dtype)


def _attend_by_group(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Returns what SDPA does, with the query heads that share K/V as further rows of one head.

    K and V are then read once instead of once a query head, and products have more rows: with few queries a request
    up to six times as fast in bfloat16 on a CPU, never slower in float32.
    """
    heads, rows = key.shape[1], query.shape[2]
    group = query.shape[1] // heads
    grouped = query.unflatten(1, (heads, group)).flatten(2, 3)
    if rows > 1:
        # A single row's mask is broadcast.
        mask = mask.unsqueeze(-3).expand(*mask.shape[:-2], group, *mask.shape[-2:]).flatten(-3, -2)
    out = F.scaled_dot_product_attention(grouped, key, value, mask, scale=scaling)
    return out.unflatten(2, (group, rows)).flatten(1, 2)


def fork(anchor: Tensor, ancestors: Tensor, cells: int, dtype: torch.dtype) -> Tensor:
    """Returns 0 where a node of a tree may look and -inf elsewhere, [*anchor.shape, cells].

    It sees what lies before its tree, the anchor, the nodes that lead to it, and itself.

    Args:
        anchor: int64, cell of each node's anchor.
        ancestors: bool [*anchor.shape, N+1], which cells from the anchor's on it sees.
        cells: how many cells there are.
        dtype: of the result.
    """
    behind = torch.arange(cells, device=anchor.device) - anchor[..., None]
    within = ancestors.gather(-1, behind.clamp(0, ancestors.shape[-1] - 1)) & (behind < ancestors.shape[-1])
    seen = torch.where(behind < 0, True, within)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


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
