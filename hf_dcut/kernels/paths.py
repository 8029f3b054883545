"""Which path a kernel takes: "triton", "varlen" (torch's variable-length attention) or "reference".

What a machine can do is tried, not looked up by version: a path is taken on a device once it has solved a small problem
there as the reference does, and where it has not, that is said once with the reason. On a CPU the references run.
"""

from __future__ import annotations

import importlib
import logging
from functools import cache
from types import ModuleType
from typing import Any

import torch

from hf_dcut.kernels import trials

logger = logging.getLogger(__name__)

_MODULES = {
    ("select", "triton"): "fused.select",
    ("select", "reference"): "reference.select",
    ("argmax_logprob", "triton"): "fused.argmax_logprob",
    ("argmax_logprob", "reference"): "reference.argmax_logprob",
    ("packed_attention", "triton"): "fused.packed_attention",
    ("packed_attention", "varlen"): "fused.varlen_attention",
    ("packed_attention", "reference"): "reference.packed_attention",
}


def load(op: str, path: str) -> ModuleType:
    """Returns the module with an op's path.

    Raises:
        ValueError: there is no such path.
        ImportError: Triton is missing.
    """
    if (op, path) not in _MODULES:
        allowed = ", ".join(repr(p) for o, p in _MODULES if o == op)
        raise ValueError(f"path={path!r} for {op}: give one of {allowed}, or None to let the device decide")
    try:
        return importlib.import_module(f"hf_dcut.kernels.{_MODULES[op, path]}")
    except ImportError as error:
        raise ImportError(
            f"path={path!r} for {op} needs Triton, which cannot be imported ({error}): install the CUDA build of torch, "
            "which brings it, or pip install 'hf-dcut[triton]'"
        ) from error


@torch.compiler.assume_constant_result
def select_path(device: torch.device, rows: int, depth: int) -> str:
    """Returns the path of `select` for so many requests and drafts."""
    if not _works("select", "triton", device):
        return "reference"
    fits: bool = load("select", "triton").fits(rows, depth)
    return "triton" if fits else "reference"


@torch.compiler.assume_constant_result
def argmax_path(device: torch.device) -> str:
    """Returns the path of `argmax_logprob`."""
    return "triton" if _works("argmax_logprob", "triton", device) else "reference"


@torch.compiler.assume_constant_result
def attention_path(
    device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, extras: bool = False
) -> str:
    """Returns the path of `packed_attention`.

    Args:
        device, dtype: of the queries.
        key_dim, value_dim: sizes of a head.
        extras: whether soft cap, sinks or ancestors are asked for, which varlen attention lacks.
    """
    for path in ("triton",) if extras else ("varlen", "triton"):
        if _works("packed_attention", path, device, dtype, key_dim, value_dim):
            return path
    return "reference"


@cache
def _works(op: str, path: str, device: torch.device, *problem: Any) -> bool:
    """Returns whether a path solves its small problem on a device; says why where it does not."""
    if device.type != "cuda":
        return False
    try:
        fault = trials.TRIALS[op](load(op, path), device, *problem)
    except _failures() as error:
        fault = f"{type(error).__name__}: {error}"
    if fault is not None:
        told = " ".join(str(part) for part in (path, op, *problem))
        logger.warning("%s is not used on %s (%s)", told, torch.cuda.get_device_name(device), fault)
    return fault is None


def _failures() -> tuple[type[Exception], ...]:
    """Returns what importing, compiling and launching a kernel raises where it cannot run."""
    known = (ImportError, AttributeError, RuntimeError, TypeError, ValueError)
    if importlib.util.find_spec("triton") is None:
        return known
    from triton.errors import TritonError

    return (*known, TritonError)
