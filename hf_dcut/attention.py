"""Packed attention behind Transformers' attention interface, for the duration of one forward.

Setting a model's attention implementation writes into its config, so a plain forward in another thread would run ours.
Instead a context variable, set around our forward only, is consulted when Transformers looks its function up. Models
whose code does not ask the interface are found by the check in `target.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from hf_dcut.kernels import band, decode_attention, prefill_attention
from hf_dcut.types import Packed

_active: ContextVar[PackedAttention | None] = ContextVar("hf_dcut_attention", default=None)
_lookup = AttentionInterface.get_interface

# Keywords that models pass along and that change nothing about attention.
_HARMLESS = {"position_ids", "use_cache", "output_router_logits", "packed", "logits_to_keep"}


class UnsupportedAttention(ValueError):
    """The model's attention asks for something that packed verification does not do."""


class PackedAttention:
    """The attention function of one packed forward. Masks are made once and shared by all layers.

    Args:
        packed: the row; decoding requests first, then prompts.
    """

    def __init__(self, packed: Packed):
        self.packed = packed
        self.decode_rows = 0
        self.prompts: list[tuple[int, int, int, int]] = []
        start = packed.start.long()
        if packed.decoding:
            first, end = start[: packed.decoding, None], start[1 : packed.decoding + 1, None]
            offset = torch.arange(packed.width, device=start.device)
            self.row = torch.where(first + offset < end, first + offset, first)
            self.query_cell = packed.cell[first] + offset  # [R, W]
        if packed.decoding < len(start) - 1:
            self._place_prompts(start)
        else:
            self.decode_rows = len(packed)
        self.place = self._place_decoding(start) if packed.decoding else None
        self.masks: dict[tuple[str, int, int | None], Tensor] = {}

    def _place_prompts(self, start: Tensor) -> None:
        """Reads on the host where prompts lie; only steps that read prompts pay for it."""
        *bounds, end = start[self.packed.decoding :].tolist()
        slots, cells = self.packed.slot[bounds].tolist(), self.packed.cell[bounds].tolist()
        self.decode_rows = bounds[0]
        self.prompts = list(zip(bounds, [*bounds[1:], end], slots, cells, strict=True))

    def _place_decoding(self, start: Tensor) -> tuple[Tensor, Tensor]:
        """Returns request and offset of each decoding row, int64 [T] each."""
        requests = torch.arange(self.packed.decoding, device=start.device)
        counts = start[: self.packed.decoding + 1].diff()
        request = torch.repeat_interleave(requests, counts, output_size=self.decode_rows)
        return request, self.packed.node[: self.decode_rows] + 1

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Returns the attention output [1, T, heads, dim] and no weights.

        Args:
            module: the layer's attention module.
            query: [1, heads, T, dim] of the packed row.
            key, value: [slots, kv heads, reach, dim], as `SlotCache.update` returned them.
            attention_mask: a placeholder that keeps Transformers from building a mask.
            scaling: factor of the scores; 1/sqrt(dim) when None.
            sliding_window: width of this layer's window.
            others: what else the model's code passes.

        Raises:
            UnsupportedAttention: a keyword that asks for something this function does not do.
        """
        unknown = sorted(
            k for k, v in others.items() if k not in _HARMLESS and v is not None and (k, v) != ("dropout", 0.0)
        )
        if unknown:
            raise UnsupportedAttention(
                f"{type(module).__name__} passes attention keywords that packed verification does not handle: "
                f"{', '.join(unknown)}. Generate without dcut for this model"
            )
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        rows, parts = query[0].transpose(0, 1), []
        if self.place is not None:
            live, decoding = slice(self.packed.decoding), rows[: self.decode_rows]
            mask = self._decode_mask(sliding_window, query.dtype)
            parts.append(decode_attention(decoding, key[live], value[live], self.row, self.place, mask, scaling))
        for index, (first, end, slot, cell) in enumerate(self.prompts):
            own = slice(cell + end - first)
            mask = self._prompt_mask(index, sliding_window, query.dtype)
            parts.append(prefill_attention(rows[first:end], key[slot, :, own], value[slot, :, own], mask, scaling))
        return torch.cat(parts)[None] if len(parts) > 1 else parts[0][None], None

    def _decode_mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Returns the mask of the decoding requests, [R, 1, W, reach]."""
        name = ("decode", 0, window)
        if name not in self.masks:
            self.masks[name] = band(self.query_cell, self.packed.reach, window, dtype)[:, None]
        return self.masks[name]

    def _prompt_mask(self, index: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Returns the mask of one prompt piece, [n, cells]; None where plain causality says the same."""
        first, end, _, cell = self.prompts[index]
        length = cell + end - first
        if cell == 0 and (window is None or length <= window):
            return None
        name = ("prompt", index, window)
        if name not in self.masks:
            cells = torch.arange(cell, length, device=self.packed.cell.device)
            self.masks[name] = band(cells, length, window, dtype)
        return self.masks[name]


@contextmanager
def packed_attention(packed: Packed) -> Iterator[None]:
    """Makes the forwards of this thread (and no other) attend as the packed row asks."""
    token = _active.set(PackedAttention(packed))
    try:
        yield
    finally:
        _active.reset(token)


def enable() -> None:
    """Lets packed forwards replace the attention function. Without one, lookups are Transformers' own."""
    AttentionInterface.get_interface = _get_interface


def disable() -> None:
    """Puts Transformers' own lookup back."""
    AttentionInterface.get_interface = _lookup


def _get_interface(
    self: AttentionInterface, attn_implementation: str, default: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns this thread's packed attention while there is one, else Transformers' choice."""
    active = _active.get()
    return _lookup(self, attn_implementation, default) if active is None else active
