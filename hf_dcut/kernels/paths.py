"""Which path a kernel takes: "triton", "varlen" (torch's variable-length attention) or "reference".

What a machine can do is tried, not looked up by version: a path is taken on a device once it has solved a small problem
there as the reference does, and where it has not, that is said once with the reason. On a CPU the references run.
"""

from __future__ import annotations

import importlib.util
import logging
from functools import cache
from types import ModuleType
from typing import Any

import torch

from hf_dcut.kernels import trials
from hf_dcut.kernels.reference import argmax_logprob, packed_attention, select

logger = logging.getLogger(__name__)

_REFERENCES = {"select": select, "argmax_logprob": argmax_logprob, "packed_attention": packed_attention}


def load(op: str, path: str) -> ModuleType:
    """Returns the module with an op's path.

    Raises:
        ValueError: there is no such path.
        ImportError: Triton is missing.
    """
    if path == "reference":
        return _REFERENCES[op]
    if (op, path) == ("packed_attention", "varlen"):
        from hf_dcut.kernels.fused import varlen_attention

        return varlen_attention
    if path == "triton":
        return _triton()[op]
    others = " or 'varlen'" if op == "packed_attention" else ""
    raise ValueError(f"path={path!r} for {op}: give 'triton', 'reference'{others}, or None to let the device decide")


def _triton() -> dict[str, ModuleType]:
    """Returns the kernels in Triton by op, which is imported here for the first time."""
    try:
        from hf_dcut.kernels.fused import argmax_logprob, packed_attention, select
    except ImportError as error:
        raise ImportError(
            f"path='triton' needs Triton, which cannot be imported ({error}): install the CUDA build of torch, which "
            "brings it, or pip install 'hf-dcut[triton]'"
        ) from error
    return {"select": select, "argmax_logprob": argmax_logprob, "packed_attention": packed_attention}


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
def attention_path(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, extras: bool = False) -> str:
    """Returns the path of `packed_attention`.

    Args:
        device, dtype: of the queries.
        key_dim, value_dim: sizes of a head.
        extras: whether soft cap, sinks or ancestors are asked for, which varlen attention lacks.
    """
    for path in ("triton",) if extras else ("varlen", "triton"):
        if _works("packed_attention", path, device, dtype, key_dim, value_dim, *([True] if extras else [])):
            return path
    return "reference"


@cache
def _works(op: str, path: str, device: torch.device, *problem: Any) -> bool:
    """Returns whether a path solves its small problem on a device; says why where it does not."""
    if device.type != "cuda":
        return False
    try:
        fault = trials.TRIALS[op](load(op, path), device, *problem)
    except failures() as error:
        fault = f"{type(error).__name__}: {error}"
    if fault is not None:
        told = " ".join(str(part) for part in (path, op, *problem))
        logger.warning("%s is not used on %s (%s)", told, torch.cuda.get_device_name(device), fault)
    return fault is None


def failures() -> tuple[type[Exception], ...]:
    """Returns what importing, compiling and launching a kernel raises where it cannot run."""
    known = (ImportError, AttributeError, RuntimeError, TypeError, ValueError)
    if importlib.util.find_spec("triton") is None:
        return known
    from triton.errors import TritonError

    return (*known, TritonError)
