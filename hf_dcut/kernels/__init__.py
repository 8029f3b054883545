"""The switch: one public function per kernel. Callers import from here and nowhere else.

Each picks its path by what it is given: on a CUDA device the first that can do it and whose result on a small problem
is the reference's (tried once a process, see `paths.py`), else the plain torch reference. `path=` chooses one; then
nothing else is tried.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_dcut.kernels import paths
from hf_dcut.kernels.paths import attention_path, select_path
from hf_dcut.kernels.reference.packed_attention import Formula, band, check, decode_attention, fork, prefill_attention
from hf_dcut.kernels.reference.select import QUANTUM, Selected, gains, lay_out, ranks, survivals

__all__ = [
    "QUANTUM",
    "Formula",
    "Selected",
    "argmax_logprob",
    "attention_path",
    "band",
    "check",
    "decode_attention",
    "fork",
    "gains",
    "lay_out",
    "packed_attention",
    "prefill_attention",
    "ranks",
    "select",
    "select_path",
    "survivals",
]


def argmax_logprob(logits: Tensor, path: str | None = None) -> tuple[Tensor, Tensor]:
    """Returns the likeliest entry int64 [...] of each row of logits and its log-probability float32 [...].

    Args:
        logits: float [..., V].
        path: "triton" or "reference"; None for the device's own.

    Raises:
        ValueError: no such path.
    """
    path = path or paths.argmax_path(logits.device)
    index, logprob = paths.load("argmax_logprob", path).argmax_logprob(logits)
    return index, logprob


def packed_attention(query: Tensor, *layout: Any, path: str | None = None, **options: Any) -> Tensor:
    """Returns the attention output [T, heads, value dim] of a packed ragged row over its slots.

    Args:
        query: [T, heads, dim].
        layout, options: key, value, start, begin, used and the others, as in `reference/packed_attention.py`.
        path: "varlen", "triton" or "reference"; None for the device's own.

    Raises:
        ValueError: no such path, or it was chosen and does not do what is asked.
    """
    if path is None:
        extras = any(options.get(name) is not None for name in ("softcap", "sinks", "ancestors"))
        key, value = layout[:2]
        path = attention_path(query.device, query.dtype, key.shape[-1], value.shape[-1], extras)
    out: Tensor = paths.load("packed_attention", path).packed_attention(query, *layout, **options)
    return out


def select(confidence: Tensor, *request: Tensor, path: str | None = None) -> Selected:
    """Returns the cut with the most expected tokens a second, and its packed row.

    Args:
        confidence: float [B, D].
        request: token, count and the others, as in `reference/select.py`.
        path: "triton" or "reference"; None for the device's own.

    Raises:
        ValueError: no such path, or more requests or drafts than it takes.
    """
    path = path or select_path(confidence.device, *confidence.shape)
    selected: Selected = paths.load("select", path).select(confidence, *request)
    return selected
