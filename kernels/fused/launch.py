"""Where kernels are launched: Triton takes the current GPU, whatever the tensors lie on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Makes a tensor's GPU the current one; nothing for the interpreter's CPU tensors."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
