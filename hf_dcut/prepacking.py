"""Prepacked weights: linear layers whose weights are laid out for oneDNN, on a CPU, for the time of a call.

A step has few rows, and reading the weights is most of what it takes, so that verifying 16 tokens should cost hardly
more than verifying one. With weights as they lie, torch's product of a few rows is far from that: it takes two to seven
times as long as reading them. oneDNN's own layout is read at full speed whatever the number of rows.

The copy is made when a call begins and gone when it ends, since weights may change between calls. Rounding is in
another order than without it, as it is for any two numbers of rows.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dcut.swapping import Swap

logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16)
# What copies may take of the free memory, so that there is room for the slots.
_SHARE, _GIB = 0.25, 1 << 30


def packs(weight: Tensor) -> bool:
    """Returns whether a weight can be laid out anew: an ordinary one of a CPU, in a torch whose oneDNN does it."""
    ordinary = type(weight) in (Tensor, nn.Parameter) and weight.device.type == "cpu"
    return ordinary and weight.dtype in _DTYPES and works(weight.dtype)


@cache
def works(dtype: torch.dtype) -> bool:
    """Returns whether this machine's torch can do it in a dtype: a small product is right."""
    if not torch.backends.mkldnn.is_available():
        return False
    weight = torch.arange(96.0).view(12, 8).to(dtype)
    try:
        with torch.no_grad():
            found = packed_linear(weight)(weight[:3])
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        logger.info("weights are not prepacked in %s: %s", dtype, error)
        return False
    return torch.allclose(found, F.linear(weight[:3], weight), rtol=0.02)


def packed_linear(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Returns a function from rows [..., in] to rows @ weight.T + bias [..., out].

    It reads a copy of the weight; where gradients are wanted, the weight itself.

    Args:
        weight: [out, in], one that `packs`.
        bias: [out].
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    def linear(rows: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return F.linear(rows, weight, bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
        return out

    return linear


class PackedForward:
    """Forward of an `nn.Linear` from a copy of its weight; where gradients are wanted, from the weight itself."""

    def __init__(self, module: nn.Linear):
        self.module = module
        self.renew()

    def renew(self) -> None:
        """Copies the weight as it is now."""
        self._linear: Callable[[Tensor], Tensor] | None = packed_linear(self.module.weight, self.module.bias)

    def __call__(self, input: Tensor) -> Tensor:
        """Returns [..., out] of `input` [..., in]."""
        if self._linear is None or torch.is_grad_enabled() or input.dtype != self.module.weight.dtype:
            return F.linear(input, self.module.weight, self.module.bias)
        return self._linear(input)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedForward:
        """Returns the forward of a copied module, whose weights may become others."""
        twin = copy.copy(self)
        twin.module, twin._linear = copy.deepcopy(self.module, memo), None
        return twin


def prepacked(models: Iterable[nn.Module], wanted: bool | str) -> AbstractContextManager[None]:
    """Runs the linear layers of some modules from prepacked weights for the time of a call.

    Args:
        models: whose layers.
        wanted: "auto" where a copy of their weights leaves enough memory, True whether it does or not, or False.

    Raises:
        ValueError: it is wanted, and no layer can be prepacked.
    """
    if wanted is False:
        return _packed([])
    modules = dict.fromkeys(module for model in models for module in model.modules() if is_linear(module))
    found: dict[nn.Module, Tensor] = {module: module.get_parameter("weight") for module in modules}
    layers = {module: weight for module, weight in found.items() if packs(weight)}
    if wanted is True and not layers:
        kinds = ", ".join(sorted({f"{weight.dtype} on {weight.device.type}" for weight in found.values()}))
        raise ValueError(
            f"dcut prepack=True: there are no linear layers in float32 or bfloat16 on a CPU whose oneDNN takes them "
            f"(found: {kinds or 'none'}). Give 'auto' or False"
        )
    needed = sum(weight.nbytes for weight in layers.values())
    if wanted == "auto" and needed > _SHARE * (free := psutil.virtual_memory().available):
        logger.info(
            "weights are not prepacked: a copy takes %.1f GiB of %.1f that are free", needed / _GIB, free / _GIB
        )
        return _packed([])
    return _packed(layers)


def runs_packed(model: nn.Module) -> bool:
    """Returns whether layers of a model run prepacked at the moment."""
    return any(isinstance(vars(module).get("forward"), PackedForward) for module in model.modules())


def renew(model: nn.Module) -> None:
    """Copies the weights of layers that run prepacked anew, since they may have changed."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, PackedForward):
            forward.renew()


def is_linear(module: nn.Module) -> bool:
    """Returns whether a module is torch's own linear layer with an ordinary weight, not a quantised or sharded one."""
    return type(module) is nn.Linear and type(module.weight) in (Tensor, nn.Parameter)


def has_own_forward(module: nn.Module) -> bool:
    """Returns whether somebody has replaced a module's forward by one that may do something else."""
    forward = vars(module).get("forward")
    return forward is not None and not isinstance(forward, PackedForward)


def _change(module: nn.Module) -> None:
    assert isinstance(module, nn.Linear)
    vars(module)["forward"] = PackedForward(module)


def _restore(module: nn.Module) -> None:
    del vars(module)["forward"]


_packed = Swap(lambda module: not has_own_forward(module), _change, _restore)
