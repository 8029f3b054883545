"""`BlockAttention`: what the blocks of one step see of their requests' context and of themselves.

A block lies in the cells behind its context, so one slice holds both. With a context of three cells, a block of three
and a window of three, the rows of the block see, of cells 0 .. 5:

    everything      window          causal window
    x x x x x x     . x x x x x     . x x x . .
    x x x x x x     . . x x x x     . . x x x .
    x x x x x x     . . . x x x     . . . x x x
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_dcut.cache import SlotLayer
from hf_dcut.types import Batch


class BlockAttention:
    """Attention of the blocks of one step. Masks are made once and shared by the layers that see the same.

    Args:
        batch: the requests, on the drafter's device.
        offsets: int64 [block], 0 .. block - 1.
    """

    def __init__(self, batch: Batch, offsets: Tensor):
        self.batch, self.offsets, self.rows = batch, offsets, len(batch)
        self.slot = batch.slot[:, None].expand(-1, len(offsets)).flatten()
        self.cell = (batch.length[:, None] + offsets).flatten()
        # The one host read of a draft, unless it is given: how far the slice of cells must go.
        self.reach = int(batch.length.max()) + len(offsets) if batch.reach is None else batch.reach
        # One request sees all cells of its slice where that goes no further than its block.
        self.sees_all = len(batch) == 1 and batch.reach is None
        self._masks: dict[tuple[int, int | None, bool], Tensor | None] = {}

    def __call__(
        self,
        cache: SlotLayer,
        window: int | None,
        causal: bool,
        sinks: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """Stores the block's K/V [B, block, kv heads, dim] and returns what `query` gathers, [B, n, heads * dim].

        Args:
            cache: K/V of the layer.
            window: rows see cells less than this far from them; None for all.
            causal: whether a row sees no cell behind it.
            sinks: [heads], a score of each head that gathers nothing; None without.
            query: [B, n, heads, dim] of the last n rows of each block.
            key, value: of all rows of the block.
        """
        cache.store(self.slot, self.cell, key.flatten(0, 1), value.flatten(0, 1))
        keys, values = cache.view(self.rows, self.reach)
        # The query heads that share a K/V head are just more rows of it: no K/V is repeated, and every SDPA backend
        # can do it.
        rows, groups = query.shape[1], query.shape[2] // keys.shape[1]
        folded = query.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = self._mask(rows, window, causal)
        if mask is not None and mask.shape[2] > 1:
            mask = mask.repeat(1, 1, groups, 1)
        if sinks is None:
            gathered = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
        else:
            gathered = _gather_beside_sinks(folded, keys, values, mask, sinks.repeat_interleave(rows))
        return gathered.unflatten(2, (groups, rows)).permute(0, 3, 1, 2, 4).flatten(2)

    def _mask(self, rows: int, window: int | None, causal: bool) -> Tensor | None:
        """Returns which cells the last `rows` of each block see, bool [B, 1, rows or 1, reach]; None for all."""
        if window is not None and window >= self.reach:
            window = None
        kind = (rows, window, causal)
        if kind not in self._masks:
            self._masks[kind] = self._make_mask(*kind)
        return self._masks[kind]

    def _make_mask(self, rows: int, window: int | None, causal: bool) -> Tensor | None:
        length, cell = self.batch.length[:, None, None, None], torch.arange(self.reach, device=self.offsets.device)
        seen = cell < length + len(self.offsets)
        if window is None and not causal:
            return None if self.sees_all else seen
        # How far back a cell lies from a row; negative for cells behind it.
        back = length + self.offsets[-rows:, None] - cell
        if causal:
            seen = seen & (back >= 0)
        if window is not None:
            seen = seen & (back.abs() < window)
        return seen


def _gather_beside_sinks(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, sinks: Tensor) -> Tensor:
    """Returns what queries gather [B, kv heads, n, dim] when a sink's score takes part in each softmax.

    Args:
        query: [B, kv heads, n, dim].
        keys, values: [B, kv heads, reach, dim].
        mask: bool [B, 1, n or 1, reach], or None.
        sinks: [kv heads * n], of each query row.
    """
    scores = query @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    sink = sinks.view(1, query.shape[1], query.shape[2], 1).expand(len(query), -1, -1, -1)
    wide = torch.promote_types(query.dtype, torch.float32)
    weight = torch.cat((scores, sink), dim=-1).softmax(dim=-1, dtype=wide)[..., :-1]
    return weight.to(values.dtype) @ values
