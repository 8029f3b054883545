"""Packed attention behind Transformers' attention interface, for the duration of one forward.

Setting a model's attention implementation writes into its config, so a plain forward in another thread would run ours.
Instead a context variable, set around our forward only, is consulted when Transformers looks its function up. Models
whose code does not ask the interface are found by `trial.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from hf_dcut.kernels import attention_path, band, check, decode_attention, fork, prefill_attention
from hf_dcut.kernels import packed_attention as ragged_attention
from hf_dcut.types import Packed

_active: ContextVar[PackedAttention | None] = ContextVar("hf_dcut_attention", default=None)
_lookup = AttentionInterface.get_interface

# Keywords that models pass along and that change nothing about attention.
_HARMLESS = {"position_ids", "use_cache", "output_router_logits", "packed", "logits_to_keep"}
# The same, of keywords that ask for something when they are else than this.
_NEUTRAL = (("dropout", 0.0), ("output_attentions", False))

# Rows of padding that one more call on a piece is worth, measured on a CPU.
_PIECE = 20


class UnsupportedAttention(ValueError):
    """The model's attention asks for something that packed verification does not do."""


class Formula(NamedTuple):
    """What a layer makes of its scores, as the kernels take it: factor, window, soft cap, a sink for each head."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class Heads(NamedTuple):
    """What decides which kernel a layer's attention takes: K and V size of a head, and if it has a cap or sinks."""

    key_dim: int
    value_dim: int
    extras: bool


class PackedAttention:
    """The attention function of one packed forward. Masks are made once and shared by all layers.

    Where a fused kernel runs it takes the row as it is. Else decoding requests go together, the first `width` rows of
    each, padded. What is left goes piece by piece: prompts, and on a CPU the tails of the few requests that kept many
    more drafts than the others, so that these do not set the padding of all.

    Args:
        packed: the row; decoding requests first, then prompts.
        path: of the kernel; None for the device's own.
        windows: {layer: its window or None}, for models that leave windows to their masks; in layers that are not in
            it, what the model's code passes counts.

    Attributes:
        heads: of the layers that attended so far.
    """

    def __init__(self, packed: Packed, path: str | None = None, windows: Mapping[int, int | None] | None = None):
        self.packed, self.path, self.windows = packed, path, windows or {}
        self.masks: dict[tuple[str, int, int | None], Tensor] = {}
        # Where each request's slot begins, by the length of slots.
        self.begin: dict[int, Tensor] = {}
        # First row, end row, slot and first cell of each piece.
        self.pieces: list[tuple[int, int, int, int]] = []
        self.placed = False
        self.heads: set[Heads] = set()

    def _place(self) -> None:
        """Sets where padded rows and pieces lie, once, for all layers."""
        packed, self.placed = self.packed, True
        start = packed.start.long()
        if packed.decoding:
            self._place_decoding(start[: packed.decoding + 1])
        if packed.decoding < len(start) - 1:
            self._place_prompts(start[packed.decoding :])

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
        softcap: float | None = None,
        s_aux: Tensor | None = None,
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
            softcap: scores s become softcap * tanh(s / softcap).
            s_aux: [heads], a score a head that takes part in the softmax and has no value: a sink.
            others: what else the model's code passes.

        Raises:
            UnsupportedAttention: a keyword that asks for something this function does not do.
        """
        unknown = sorted(
            k for k, v in others.items() if k not in _HARMLESS and v is not None and (k, v) not in _NEUTRAL
        )
        if unknown:
            raise UnsupportedAttention(
                f"{type(module).__name__} passes attention keywords that packed verification does not handle: "
                f"{', '.join(unknown)}. Generate without dcut for this model"
            )
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        formula = Formula(scaling, self._window(module, sliding_window), softcap, s_aux)
        rows = query[0].transpose(0, 1)
        heads = Heads(key.shape[-1], value.shape[-1], softcap is not None or s_aux is not None)
        self.heads.add(heads)
        extras = heads.extras or self.packed.ancestors is not None
        path = self.path or attention_path(query.device, query.dtype, heads.key_dim, heads.value_dim, extras)
        attend = self._pieces if path == "reference" else partial(self._ragged, path)
        return attend(rows, key, value, formula)[None], None

    def _window(self, module: nn.Module, passed: int | None) -> int | None:
        """Returns the window of a layer: what its own cache has, which must not differ from what its code passes."""
        layer: Any = getattr(module, "layer_idx", None)
        if layer not in self.windows:
            return passed
        own = self.windows[layer]
        if passed is not None and passed != own:
            raise UnsupportedAttention(
                f"{type(module).__name__} passes sliding_window={passed} in a layer whose cache has a window of {own}: "
                f"packed verification cannot tell which is meant. Generate without dcut for this model"
            )
        return own

    def _pieces(self, rows: Tensor, key: Tensor, value: Tensor, formula: Formula) -> Tensor:
        """Returns the attention output [T, heads, dim] from plain torch, group by group."""
        if not self.placed:
            self._place()
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

    def _ragged(self, path: str, rows: Tensor, key: Tensor, value: Tensor, formula: Formula) -> Tensor:
        """Returns the attention output [T, heads, dim] from a fused kernel, all requests in one call."""
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
            return ragged_attention(rows, keys, values, *layout, ancestors=packed.ancestors, path=path)
        # Trees and prompts apart: only the former have ancestors.
        edge, prompts = len(packed.ancestors), packed.start[decoding:]
        trees = (packed.start[: decoding + 1], begin[: decoding + 1], packed.used[:decoding], packed.width)
        texts = (prompts - prompts[:1], begin[decoding:], packed.used[decoding:], len(packed) - edge)
        parts = (rows[:edge], trees, packed.ancestors), (rows[edge:], texts, None)
        return torch.cat(
            [
                ragged_attention(own, keys, values, *layout, packed.reach, *formula, ancestors=ancestors, path=path)
                for own, layout, ancestors in parts
            ]
        )

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


@contextmanager
def packed_attention(packed: Packed, windows: Mapping[int, int | None] | None = None) -> Iterator[PackedAttention]:
    """Makes the forwards of this thread (and no other) attend as the packed row asks, by the function that it gives."""
    attention = PackedAttention(packed, windows=windows)
    token = _active.set(attention)
    try:
        yield attention
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
