"""Attention of a packed row by torch's SDPA, group by group, where no fused kernel takes the row as it is.

Decoding requests go together, the first `width` rows of each, padded. What is left goes piece by piece: prompts, and on
a CPU the tails of the few requests that kept many more drafts than the others, so that these do not set the padding of
all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from hf_dcut.kernels import Formula, band, check, decode_attention, fork, prefill_attention
from hf_dcut.types import Packed

# Rows of padding that one more call on a piece is worth, measured on a CPU.
_PIECE = 20


class GroupedAttention:
    """The same row's attention in all layers; where rows lie and what they see is worked out once.

    Args:
        packed: the row; decoding requests first, then prompts.

    Attributes:
        pieces: first row, end row, slot and first cell of each piece.
    """

    def __init__(self, packed: Packed):
        self.packed = packed
        self.masks: dict[tuple[str, int, int | None], Tensor] = {}
        self.pieces: list[tuple[int, int, int, int]] = []
        start = packed.start.long()
        if packed.decoding:
            self._place_decoding(start[: packed.decoding + 1])
        if packed.decoding < len(start) - 1:
            self._place_prompts(start[packed.decoding :])

    def __call__(self, rows: Tensor, key: Tensor, value: Tensor, formula: Formula) -> Tensor:
        """Returns the attention output [T, heads, value dim].

        Args:
            rows: [T, heads, dim], queries of the packed row.
            key, value: [slots, kv heads, reach, dim].
            formula: of the layer.
        """
        scaling, window, softcap, sinks = formula
        decoding, joined = self.packed.decoding, None
        if decoding:
            layout = (self.row, self.place, self._decode_mask(window, rows.dtype))
            joined = decode_attention(rows, key[:decoding], value[:decoding], *layout, scaling, softcap, sinks)
            if self.row is None:
                return joined
        out = rows.new_empty(*rows.shape[:2], value.shape[-1])
        if joined is not None:
            out[self.together] = joined
        for index, (first, end, slot, cell) in enumerate(self.pieces):
            own, piece = slice(cell + end - first), slice(first, end)
            states = rows[piece], key[slot, :, own], value[slot, :, own]
            causal = self._piece_mask(index, window, rows.dtype)
            out[piece] = prefill_attention(*states, causal, scaling, softcap, sinks)
        return out

    def _place_decoding(self, start: Tensor) -> None:
        """Sets which rows are padded together, and leaves the tails behind them as pieces."""
        width = self.packed.width
        if start.device.type == "cpu" and not self.packed.fixed:
            bounds = start.tolist()
            counts = [end - first for first, end in pairwise(bounds)]
            width = best_width(counts)
            self.pieces += [
                (first + width, first + count, slot, int(self.packed.cell[first]) + width)
                for slot, (first, count) in enumerate(zip(bounds, counts, strict=False))
                if count > width
            ]
        offset = torch.arange(width, device=start.device)
        first, end = start[:-1, None], start[1:, None]
        self.query_cell = self.packed.cell[first] + offset  # [R, W]
        alone = not self.pieces and self.packed.decoding == len(self.packed.used)
        if alone and width * self.packed.decoding == len(self.packed):
            self.row = self.place = None
            return
        inside = first + offset < end
        self.row = torch.where(inside, first + offset, first)
        if self.pieces or self.packed.decoding < len(self.packed.used):
            request, place = inside.nonzero(as_tuple=True)
        else:
            # The same where every row is one of these, so that nobody must count them.
            rows = torch.arange(len(self.packed), device=start.device)
            request = torch.searchsorted(start[1:], rows, right=True)
            place = rows - start[request]
        self.place = request, place
        self.together = self.row[self.place]

    def _place_prompts(self, start: Tensor) -> None:
        """Reads on the host where prompts lie; only steps that read prompts pay for it."""
        *bounds, end = start.tolist()
        slots, cells = self.packed.slot[bounds].tolist(), self.packed.cell[bounds].tolist()
        self.pieces += zip(bounds, [*bounds[1:], end], slots, cells, strict=True)

    def _decode_mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Returns the mask of the decoding requests, [R, 1, W, reach]."""
        name = ("decode", 0, window)
        if name not in self.masks:
            if self.packed.ancestors is None:
                mask = band(self.query_cell, self.packed.reach, window, dtype)
            else:
                every = torch.arange(len(self.packed), device=self.query_cell.device)
                rows = every.view(self.query_cell.shape) if self.row is None else self.row
                mask = self._fork(rows, self.packed.reach, window, dtype)
            self.masks[name] = mask[:, None]
        return self.masks[name]

    def _piece_mask(self, index: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Returns the mask of one piece, [n, cells]; None where plain causality says the same."""
        first, end, _, cell = self.pieces[index]
        length = cell + end - first
        if cell == 0 and (window is None or length <= window):
            return None
        name = ("piece", index, window)
        if name not in self.masks:
            rows = torch.arange(first, end, device=self.packed.cell.device)
            if self.packed.ancestors is None or first >= len(self.packed.ancestors):
                self.masks[name] = band(rows + cell - first, length, window, dtype)
            else:
                self.masks[name] = self._fork(rows, length, window, dtype)
        return self.masks[name]

    def _fork(self, rows: Tensor, cells: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Returns the mask of some rows of trees, [*rows.shape, cells]."""
        packed = self.packed
        assert packed.ancestors is not None
        check(window, packed.ancestors)
        return fork((packed.cell - packed.node - 1)[rows], packed.ancestors[rows], cells, dtype)


def best_width(counts: Sequence[int]) -> int:
    """Returns how many rows of each request to pad together, the rest going piece by piece.

    Weighs padded rows against pieces, each of which costs about as much as `_PIECE` rows. With counts 2, 1, 1, 16 the
    answer is 2: padding to 16 would take 64 rows, padding to 2 takes 8 and one piece of 14.

    Args:
        counts: rows of each request.
    """

    def rows(width: int) -> int:
        return width * len(counts) + sum(_PIECE + count - width for count in counts if count > width)

    return min(sorted(set(counts)), key=rows)
