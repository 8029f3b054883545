"""Gated DeltaNet layers on packed rows, for the duration of one forward.

A stock layer moves one state a row of its batch over every token it is given. In a packed row requests lie one behind
the other, and drafts may be rejected. So while a packed forward runs, these layers do it our way, with their own
weights: projections, norm and output on the packed row; the convolution and the delta rule request by request, from the
states in the slots, which change when the step is committed (`states.py`). The rule (Gated Delta Networks, arXiv
2412.06464, equation 10) is Transformers' function, or the kernel that it picked: in its recurrent form for decoding
requests, padded to the longest, in its chunked form for pieces of prompts.

As with attention nothing is set on the model: its layers' class asks a context variable whether a packed forward runs
in this thread.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from hf_dcut.states import StateLayer, Steps
from hf_dcut.types import Packed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_dcut.cache import SlotCache

_active: ContextVar[Recurrence | None] = ContextVar("hf_dcut_recurrence", default=None)
# A stock layer. Models have a class of their own for it, and nothing in common that says what is in it.
DeltaNet = Any
# Layer classes that ask for a packed forward, and their own `forward`.
_stock: dict[Any, Callable[..., Any]] = {}

_adopting = threading.Lock()

# What a layer must have to be a Gated DeltaNet of the kind that is read here, and the two layouts of its projections.
_PARTS = (
    *("A_log", "dt_bias", "conv1d", "activation", "norm", "out_proj", "layer_idx"),
    *("key_dim", "value_dim", "head_k_dim", "head_v_dim"),
)
_APART = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_FUSED = ("in_proj_qkvz", "in_proj_ba", "fix_query_key_value_ordering")


class Recurrence:
    """The Gated DeltaNet layers of one packed forward. Where rows lie is found out once and shared by all layers.

    Args:
        packed: the row; decoding requests first, then prompts.
    """

    def __init__(self, packed: Packed):
        self.packed = packed
        # First row, end row and slot of each piece of a prompt.
        self.pieces: list[tuple[int, int, int]] = []
        self.placed = False

    def _place(self) -> None:
        """Sets where padded rows and pieces lie. Reads it on the host where prompts are read, and on a CPU."""
        packed, self.placed = self.packed, True
        start, decoding = packed.start.long(), packed.decoding
        if decoding:
            first, end = start[:decoding, None], start[1 : decoding + 1, None]
            width = packed.width if start.device.type != "cpu" else int((end - first).max())
            offset = torch.arange(width, device=start.device)
            inside = first + offset < end
            self.row = torch.where(inside, first + offset, first)  # [R, W]
            self.place = inside.nonzero(as_tuple=True)
            self.together = self.row[self.place]
        if decoding < len(start) - 1:
            *bounds, last = start[decoding:].tolist()
            self.pieces += zip(bounds, [*bounds[1:], last], packed.slot[bounds].tolist(), strict=True)

    def __call__(self, module: DeltaNet, hidden_states: Tensor, cache: SlotCache, **others: Any) -> Tensor:
        """Returns a layer's output [1, T, hidden size]; what becomes of the states is left in its `StateLayer`.

        Args:
            module: the stock layer.
            hidden_states: [1, T, hidden size] of the packed row.
            cache: the slots.
            others: masks and what else the model's code passes; a packed row has no padding to mask.
        """
        if not self.placed:
            self._place()
        layer: Any = cache.layers[module.layer_idx]
        layer.begin()
        inputs, gate, decay, beta = _project(module, hidden_states)
        out = inputs.new_empty(gate.shape)
        if self.packed.decoding:
            out[self.together] = self._decode(module, layer, inputs, decay, beta)[self.place]
        for first, end, slot in self.pieces:
            own = slice(first, end)
            out[own] = _read(module, layer, slot, inputs[own], decay[own], beta[own])
        normed = module.norm(out.flatten(0, 1), gate.flatten(0, 1))
        return module.out_proj(normed.view(1, len(inputs), -1))

    def _decode(self, module: DeltaNet, layer: StateLayer, inputs: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Returns what the rule gives for the decoding requests, [R, W, heads, value dim]; garbage in the padding."""
        rows, row = self.packed.decoding, self.row
        seen = torch.cat([layer.window[:rows], inputs[row]], dim=1)
        query, key, value = _convolve(module, seen)
        decay, beta = decay[row], beta[row]
        rule = _rule(module, "recurrent", final=row.shape[1] == 1)
        out, state = rule(query, key, value, g=decay, beta=beta, initial_state=layer.state[:rows])
        layer.steps = Steps(seen, key, value, decay, beta, state, _rule(module, "recurrent"))
        return out


def _read(module: DeltaNet, layer: StateLayer, slot: int, inputs: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Returns what the rule gives for n tokens of a prompt, [n, heads, value dim].

    Args:
        module: the stock layer.
        layer: its states.
        slot: of the request.
        inputs: [n, channels] of the convolution.
        decay, beta: [n, heads].
    """
    seen = torch.cat([layer.window[slot], inputs])[None]
    query, key, value = _convolve(module, seen)
    # As the stock layer does: one token alone is a step.
    rule = _rule(module, "recurrent" if len(inputs) == 1 else "chunk")
    out, state = rule(query, key, value, g=decay[None], beta=beta[None], initial_state=layer.state[slot, None])
    layer.pieces.append((slot, seen[0, len(inputs) :], state[0]))
    return out[0]


def _project(module: DeltaNet, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns inputs [T, channels] of the convolution, gate [T, heads, value dim], decay and beta [T, heads].

    Args:
        module: the stock layer.
        hidden: [1, T, hidden size].
    """
    if hasattr(module, "in_proj_qkvz"):
        projected = module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
        *mixed, gate, b, a = (x[0] for x in module.fix_query_key_value_ordering(*projected))
        inputs = torch.cat([x.flatten(1) for x in mixed], dim=-1)
    else:
        inputs, gate = module.in_proj_qkv(hidden)[0], module.in_proj_z(hidden)[0]
        b, a = module.in_proj_b(hidden)[0], module.in_proj_a(hidden)[0]
        gate = gate.view(len(gate), -1, module.head_v_dim)
    # In float16 exp(A_log) would overflow.
    decay = -module.A_log.float().exp() * nn.functional.softplus(a.float() + module.dt_bias)
    return inputs, gate, decay, b.sigmoid()


def _convolve(module: DeltaNet, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns query, key [R, n, key heads, key dim] and value [R, n, heads, value dim].

    Args:
        module: the stock layer.
        seen: [R, width + n, channels], what the convolution sees.
    """
    weight, bias = module.conv1d.weight, module.conv1d.bias
    mixed = nn.functional.conv1d(seen.transpose(1, 2).to(weight.dtype), weight, bias, groups=len(weight))
    mixed = ACT2FN[module.activation](mixed).to(seen.dtype).transpose(1, 2)
    sizes = (module.key_dim, module.key_dim, module.value_dim)
    dims = (module.head_k_dim, module.head_k_dim, module.head_v_dim)
    query, key, value = (x.unflatten(-1, (-1, dim)) for x, dim in zip(mixed.split(sizes, dim=-1), dims, strict=True))
    return query, key, value


def _rule(module: nn.Module, form: str, final: bool = True) -> Callable[..., Any]:
    """Returns the gated delta rule that the layer's own code uses.

    Args:
        module: the stock layer.
        form: "recurrent" or "chunk".
        final: whether the state behind the last row is wanted.
    """
    rule = getattr(importlib.import_module(type(module).__module__), f"torch_{form}_gated_delta_rule")
    return functools.partial(rule, output_final_state=final, use_qk_l2norm_in_kernel=True)


def delta_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the Gated DeltaNet layers of a model that packed rows can go through; others are told by `trial.py`."""

    def has(module: nn.Module, names: tuple[str, ...]) -> bool:
        return all(hasattr(module, name) for name in names)

    return [m for m in model.modules() if has(m, _PARTS) and (has(m, _APART) or has(m, _FUSED))]


def recurrent_names(model: PreTrainedModel) -> str:
    """Returns the classes of layers that look recurrent, as " (A, B)"; nothing where none does."""
    marks = ("A_log", "conv1d", "time_decay", "slope_rate", "rg_lru")
    kinds = {type(module).__name__ for module in model.modules() if any(hasattr(module, mark) for mark in marks)}
    return f" ({', '.join(sorted(kinds))})" if kinds else ""


def adopt(layers: list[nn.Module]) -> None:
    """Lets packed forwards run these layers. Without one, they run their own code."""
    with _adopting:
        for layer in layers:
            kind: Any = next(kind for kind in type(layer).__mro__ if "forward" in vars(kind))
            if kind not in _stock:
                _stock[kind] = kind.forward
                kind.forward = _switched(kind.forward)


def disable() -> None:
    """Puts the layers' own `forward` back."""
    with _adopting:
        while _stock:
            kind, forward = _stock.popitem()
            kind.forward = forward


def _switched(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `forward` that is this thread's packed one while there is one, else the stock layer's."""

    @functools.wraps(stock)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        active = _active.get()
        return stock(self, *args, **kwargs) if active is None else active(self, *args, **kwargs)

    return forward


@contextmanager
def packed_recurrence(packed: Packed) -> Iterator[None]:
    """Makes the Gated DeltaNet layers of this thread's forwards (and no other's) run the packed row."""
    token = _active.set(Recurrence(packed))
    try:
        yield
    finally:
        _active.reset(token)
