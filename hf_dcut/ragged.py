"""Attention of a packed row by a fused kernel: the row as it is, over all slots as one long row of cells."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_dcut.kernels import Formula, packed_attention
from hf_dcut.types import Packed


class RaggedAttention:
    """The same row's attention in all layers.

    Args:
        packed: the row; decoding requests first, then prompts.
        path: of the kernel.
    """

    def __init__(self, packed: Packed, path: str):
        self.packed, self.path = packed, path
        # Where each request's slot begins, by the length of slots.
        self.begin: dict[int, Tensor] = {}

    def __call__(self, rows: Tensor, key: Tensor, value: Tensor, formula: Formula) -> Tensor:
        """Returns the attention output [T, heads, value dim], all requests in one call, or trees and prompts in two.

        Args:
            rows: [T, heads, dim], queries of the packed row.
            key, value: [slots, kv heads, reach, dim].
            formula: of the layer.
        """
        packed = self.packed
        (keys, length), (values, other) = long_row(key), long_row(value)
        if other != length:
            # Latent attention makes K and V anew from what the cache holds, each in a layout of its own.
            (keys, length), (values, _) = long_row(key.contiguous()), long_row(value.contiguous())
        if length not in self.begin:
            slot = packed.slot[packed.start[:-1].long()]
            self.begin[length] = nn.functional.pad(slot * length, (0, 1)).int()
        begin, decoding, requests = self.begin[length], packed.decoding, len(packed.used)
        if packed.ancestors is None or decoding == requests:
            width = packed.width if decoding == requests else len(packed)
            layout = (packed.start, begin, packed.used, width, packed.reach, *formula)
            return packed_attention(rows, keys, values, *layout, ancestors=packed.ancestors, path=self.path)
        # Trees and prompts apart: only the former have ancestors.
        edge, prompts = len(packed.ancestors), packed.start[decoding:]
        trees = (packed.start[: decoding + 1], begin[: decoding + 1], packed.used[:decoding], packed.width)
        texts = (prompts - prompts[:1], begin[decoding:], packed.used[decoding:], len(packed) - edge)
        rest = (packed.reach, *formula)
        drafted = packed_attention(rows[:edge], keys, values, *trees, *rest, ancestors=packed.ancestors, path=self.path)
        return torch.cat([drafted, packed_attention(rows[edge:], keys, values, *texts, *rest, path=self.path)])


def long_row(states: Tensor) -> tuple[Tensor, int]:
    """Returns a view [cells, heads, dim] of all slots' cells as one long row, and how many cells lie between two slots.

    Args:
        states: [slots, heads, reach, dim], a view of the first cells of slots that lie one behind the other.
    """
    slots, heads, reach, dim = states.shape
    by_slot, by_head, by_cell, by_number = states.stride()
    length, rest = divmod(by_slot, by_cell)
    assert rest == 0, f"slots of K/V {tuple(states.shape)} with strides {states.stride()}"
    return states.as_strided(((slots - 1) * length + reach, heads, dim), (by_cell, by_head, by_number)), length
