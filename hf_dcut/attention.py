"""Packed attention behind Transformers' attention interface, for the duration of one forward.

Setting a model's attention implementation writes into its config, so a plain forward in another thread would run ours.
Instead a context variable, set around our forward only, is consulted when Transformers looks its function up. Models
whose code does not ask the interface are found by `trial.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from hf_dcut.grouped import GroupedAttention
from hf_dcut.kernels import Formula, attention_path
from hf_dcut.ragged import RaggedAttention
from hf_dcut.types import Packed

_active: ContextVar[PackedAttention | None] = ContextVar("hf_dcut_attention", default=None)
_lookup = AttentionInterface.get_interface

# Keywords that models pass along and that change nothing about attention.
_HARMLESS = {"position_ids", "use_cache", "output_router_logits", "packed", "logits_to_keep"}
# The same, of keywords that ask for something when they are else than this.
_NEUTRAL = (("dropout", 0.0), ("output_attentions", False))


class UnsupportedAttention(ValueError):
    """The model's attention asks for something that packed verification does not do."""


class Heads(NamedTuple):
    """What decides which kernel a layer's attention takes: K and V size of a head, and if it has a cap or sinks."""

    key_dim: int
    value_dim: int
    extras: bool


class PackedAttention:
    """The attention function of one packed forward: by a fused kernel (`ragged.py`), else by SDPA (`grouped.py`).

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
        self.heads: set[Heads] = set()
        self._ragged: dict[str, RaggedAttention] = {}

    @cached_property
    def grouped(self) -> GroupedAttention:
        """Returns the row's attention by SDPA, which is worked out when the first layer asks for it."""
        return GroupedAttention(self.packed)

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
        if path == "reference":
            return self.grouped(rows, key, value, formula)[None], None
        ragged = self._ragged.setdefault(path, RaggedAttention(self.packed, path))
        return ragged(rows, key, value, formula)[None], None

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
