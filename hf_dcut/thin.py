"""Thin products: few rows times the head's large weight, on a CPU in float32.

Verifying takes the logits of a handful of rows, and MKL's product of 4 to 15 rows and a vocabulary takes up to three
times as long as that of 16 where the processor has AVX-512 (with AVX2 it does not). Cut along the vocabulary, the same
product is a batch of small ones, for which MKL takes hardly longer than for reading the weight.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_dcut.swapping import Swap

# Rows that are thin, and the widest and the narrowest piece of a vocabulary.
THIN = range(4, 16)
_WIDEST, _NARROWEST = 128, 32


def thin_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns hidden @ weight.T + bias, [..., out], rounded in another order where the rows are thin.

    Args:
        hidden: [..., in].
        weight: [out, in].
        bias: [out].
    """
    rows = hidden.numel() // hidden.shape[-1]
    fits = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.is_contiguous()
    width = _width(len(weight)) if fits and rows in THIN else None
    if width is None:
        return F.linear(hidden, weight, bias)
    pieces = weight.unflatten(0, (-1, width)).transpose(1, 2)
    product = torch.matmul(hidden.reshape(rows, -1), pieces).transpose(0, 1).reshape(*hidden.shape[:-1], -1)
    return product if bias is None else product + bias


class ThinForward:
    """Forward of an `nn.Linear` whose thin products are fast; its weights are looked up at every call."""

    def __init__(self, module: nn.Linear):
        self.module = module

    def __call__(self, input: Tensor) -> Tensor:
        """Returns [..., out] of `input` [..., in]."""
        return thin_linear(input, self.module.weight, self.module.bias)


def thin_head(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Runs the model's head with fast thin products for the time of a call, if it is a plain one on a CPU."""
    head = model.get_output_embeddings()
    return _thin([head] if is_linear(head) and head.weight.device.type == "cpu" else [])


def is_linear(module: nn.Module) -> bool:
    """Returns whether a module is torch's own linear layer with an ordinary weight, not a quantised or sharded one."""
    return type(module) is nn.Linear and type(module.weight) in (Tensor, nn.Parameter)


def has_own_forward(module: nn.Module) -> bool:
    """Returns whether somebody has replaced a module's forward by one that may do something else."""
    forward = vars(module).get("forward")
    return forward is not None and not isinstance(forward, ThinForward)


def _change(module: nn.Module) -> None:
    assert isinstance(module, nn.Linear)
    vars(module)["forward"] = ThinForward(module)


def _restore(module: nn.Module) -> None:
    del vars(module)["forward"]


_thin = Swap(lambda module: not has_own_forward(module), _change, _restore)


@cache
def _width(outputs: int) -> int | None:
    """Returns how many of the outputs are a piece; None where they cannot be cut evenly."""
    return next((width for width in range(_WIDEST, _NARROWEST - 1, -1) if outputs % width == 0), None)
