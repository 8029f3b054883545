"""`SlotCache`: static K/V, one slot a request, each slot with its own length.

Rejecting drafts moves no memory: a slot's length is a number the engine keeps, and cells past it are overwritten by
the next step. Live requests stay in slots 0 .. B-1 (`move` fills the hole a finished one leaves), so attention reads a
plain slice instead of gathering slots, which costs 2.4 times as much on a CPU.

A layer stores `[slots, length, heads, dim]`, so that all slots are also one long row of cells for variable-length
kernels. Only this file and `attention.py` know that. Recurrent layers keep states instead of cells: `states.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from hf_dcut.states import StateLayer, StateShape

if TYPE_CHECKING:
    from torch import Tensor

    from hf_dcut.types import Packed, Verdict


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one cell of one layer holds: K and V apart, since they differ in latent attention.

    Layers that attend over another layer's K/V hold nothing: all sizes are 0.

    Attributes:
        key_heads, key_dim, value_heads, value_dim: of a cell.
        window: how many cells a query sees, its own included; None on full layers.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    window: int | None = None

    @property
    def elements(self) -> int:
        """Numbers stored per cell."""
        return self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def slot_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Returns the bytes of a slot of so many cells."""
        return self.elements * length * dtype.itemsize


class SlotLayer(CacheLayerMixin):
    """K and V of one attention layer, for all slots."""

    is_sliding = False

    def __init__(self, shape: LayerShape, slots: int, length: int, dtype: torch.dtype, device: torch.device | str):
        super().__init__()
        self.shape, self.length = shape, length
        self.keys = torch.zeros(slots, length, shape.key_heads, shape.key_dim, dtype=dtype, device=device)
        self.values = torch.zeros(slots, length, shape.value_heads, shape.value_dim, dtype=dtype, device=device)
        self.is_initialized = True

    def store(self, slot: Tensor, cell: Tensor, key: Tensor, value: Tensor) -> None:
        """Writes K [T, heads, dim] and V [T, heads, dim] at `slot`, `cell`: int64 [T]."""
        self.keys[slot, cell] = key
        self.values[slot, cell] = value

    def view(self, slots: int, reach: int) -> tuple[Tensor, Tensor]:
        """Returns K and V [slots, heads, reach, dim] of the first slots and cells, without copying."""
        return self.keys[:slots, :reach].transpose(1, 2), self.values[:slots, :reach].transpose(1, 2)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, packed: Packed, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores the K/V [1, heads, T, dim] of a packed row and returns views of all live slots."""
        self.store(packed.slot, packed.cell, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        return self.view(packed.slots, packed.reach)

    def move(self, source: int, destination: int) -> None:
        """Copies a slot's K/V over another slot."""
        self.keys[destination] = self.keys[source]
        self.values[destination] = self.values[source]

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copies the first `length` cells of a slot to another: requests that share a prompt."""
        self.keys[destination, :length] = self.keys[source, :length]
        self.values[destination, :length] = self.values[source, :length]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: memory is taken when the layer is made."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the cells of a slot and where they begin; masks are built by `attention.py`, not from this."""
        return self.length, 0

    def get_seq_length(self) -> int:
        """Returns 0: slots have their own lengths, so positions are always given explicitly."""
        return 0

    def get_max_length(self) -> int:
        """Returns the cells of a slot."""
        return self.length


class SlotCache(Cache):
    """The K/V of all attention layers of one model, and the states of its recurrent ones.

    Args:
        shapes: of the layers, in order.
        slots: requests that can be live at once.
        length: cells of a slot: the longest request plus the drafts of one step.
        dtype, device: as the model's K/V.

    Attributes:
        packed: the row of the forward that runs.
        windows: the window of each layer that keeps K/V, None on full ones.
    """

    layers: list[SlotLayer | StateLayer]
    packed: Packed

    def __init__(
        self,
        shapes: Sequence[LayerShape | StateShape],
        slots: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        self.slots, self.length = slots, length
        layers = [
            StateLayer(shape, slots, dtype, device)
            if isinstance(shape, StateShape)
            else SlotLayer(shape, slots, length, dtype, device)
            for shape in shapes
        ]
        super().__init__(layers=layers)
        self.states = [layer for layer in layers if isinstance(layer, StateLayer)]
        kept = {index: shape for index, shape in enumerate(shapes) if isinstance(shape, LayerShape)}
        self.windows = {index: shape.window for index, shape in kept.items() if shape.elements}

    @property
    def recurrent(self) -> bool:
        """Whether a slot can only be copied as it is, since states stand for all cells in use and for no fewer."""
        return bool(self.states)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns what `SlotLayer.update` does. The row is the cache's: not all models hand their keywords on."""
        layer = self.layers[layer_idx]
        assert isinstance(layer, SlotLayer), "recurrent layers keep their own states"
        return layer.update(key_states, value_states, packed=self.packed)

    def move(self, source: int, destination: int) -> None:
        """Moves a request to another slot, whose old content is dropped."""
        for layer in self.layers:
            layer.move(source, destination)

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copies the first `length` cells of a slot to another; with recurrent layers, all that are in use."""
        for layer in self.layers:
            layer.copy(source, destination, length)

    def free(self, slot: int) -> None:
        """Gives a slot up. Plain K/V need nothing: a new request overwrites before it reads. States start anew."""
        for layer in self.states:
            layer.free(slot)

    def commit(self, verdict: Verdict, packed: Packed) -> None:
        """Makes the accepted rows the slot's content.

        Plain K/V of a chain already lie in the right cells, those of a tree's path are moved together; recurrent states
        are replayed.
        """
        if packed.ancestors is not None:
            self._close_up(verdict, packed)
        if self.states:
            accepted = verdict.accepted[: packed.decoding]
            # One host read more, for targets with recurrent layers.
            longest = 1 + int(accepted.max()) if packed.decoding else 0
            for layer in self.states:
                layer.commit(accepted, longest)

    def _close_up(self, verdict: Verdict, packed: Packed) -> None:
        """Moves the K/V of accepted paths to the cells behind their anchors."""
        assert not self.states, "recurrent states know no trees"
        rows, cells = verdict.path[verdict.path >= 0], packed.text_cells()
        # One host read more: how many lie elsewhere.
        rows = rows[packed.cell[rows] != cells[rows]]
        if not len(rows):
            return
        slot, cell, wanted = packed.slot[rows], packed.cell[rows], cells[rows]
        for layer in self.layers:
            assert isinstance(layer, SlotLayer)
            layer.store(slot, wanted, layer.keys[slot, cell], layer.values[slot, cell])


def cache_bytes(shapes: Sequence[LayerShape | StateShape], slots: int, length: int, dtype: torch.dtype) -> int:
    """Returns the bytes a `SlotCache` of this size takes."""
    return slots * sum(shape.slot_bytes(length, dtype) for shape in shapes)


def cells_of(layer: Any) -> tuple[Tensor, ...]:
    """Returns what a layer of Transformers' cache holds in the model's dtype: K and V, or inputs of its convolution.

    Layers that attend over another layer's K/V hold nothing.
    """
    if isinstance(layer, LinearAttentionLayer):
        return (layer.conv_states[0],)
    return () if layer.keys is None else (layer.keys, layer.values)


def shape_of(layer: Any) -> LayerShape | StateShape:
    """Returns what a slot holds of a layer, told from Transformers' cache of one sequence."""
    if isinstance(layer, LinearAttentionLayer):
        (_, channels, kernel), state = layer.conv_states[0].shape, layer.recurrent_states[0]
        _, heads, key_dim, value_dim = state.shape
        return StateShape(kernel - 1, channels, heads, key_dim, value_dim, state.dtype)
    if layer.keys is None:
        return LayerShape(0, 0, 0, 0)
    key, value = layer.keys.shape, layer.values.shape
    return LayerShape(key[1], key[3], value[1], value[3], layer.sliding_window if layer.is_sliding else None)
