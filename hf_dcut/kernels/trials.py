"""Small problems on which a fused kernel must agree with its reference before it is used.

A trial gets a module with the op and returns what is wrong, None when nothing is. References run on the CPU, attention
in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from hf_dcut.kernels.reference import argmax_logprob, packed_attention, select

# Largest differences allowed: rounding of inputs of about 1 in each dtype, and of sums of a few exponentials.
ATTENTION = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
LOGPROB = 1e-5


def try_select(module: ModuleType, device: torch.device) -> str | None:
    """Returns what is wrong with a selector: three requests of up to four drafts, ties among them."""
    confidence = torch.tensor([[0.5, 0.5, 1.0, 0.25], [1.0, 0.25, 0.5, 0.5], [0.25, 1.0, 1.0, 1.0]])
    token = torch.arange(12).view(3, 4)
    columns = [torch.tensor(x) for x in ([4, 3, 2], [9, 9, 1], [20, 21, 22], [0, 1, 2], [5, 0, 7], [0, 0, 3])]
    budgets, curve = torch.tensor([4, 7, 12]), torch.tensor([[3.0, 6.0, 15.0], [1.0, 1.2, 2.0]], dtype=torch.float64)
    given = (confidence, token, *columns, budgets, curve, torch.tensor([0.75], dtype=torch.float64))
    expected, found = select.select(*given), module.select(*(x.to(device) for x in given))
    wrong = [n for n, a, b in zip(expected._fields, expected, found, strict=True) if not torch.equal(a, b.cpu())]
    return f"wrong {', '.join(wrong)}" if wrong else None


def try_argmax_logprob(module: ModuleType, device: torch.device) -> str | None:
    """Returns what is wrong with an argmax: rows longer than a block, with a tie."""
    logits = torch.sin(torch.arange(3 * 5003) * 0.7).view(3, 5003) * 4
    logits[1, 17] = logits[1, 4500] = 5.0
    index, logprob = argmax_logprob.argmax_logprob(logits)
    found, log = module.argmax_logprob(logits.to(device))
    if not torch.equal(index, found.cpu()):
        return f"index {found.tolist()} instead of {index.tolist()}"
    return _far(log, logprob, LOGPROB)


def try_attention(
    module: ModuleType, device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, extras: bool = False
) -> str | None:
    """Returns what is wrong with packed attention: three ragged requests, unused cells, grouped heads, a window.

    With `extras` a soft cap and sinks too.
    """
    counts, used, length = [2, 1, 5], [2, 40, 90], 100
    query, key, value = (
        torch.sin(torch.arange(rows * heads * dim) * step).view(rows, heads, dim).to(dtype)
        for rows, heads, dim, step in ((8, 4, key_dim, 1.3), (300, 2, key_dim, 0.7), (300, 2, value_dim, 0.3))
    )
    start, begin, cells = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 3, 8], [0, 100, 200, 300], used))
    for slot, filled in enumerate(used):
        key[slot * length + filled : (slot + 1) * length] = value[slot * length + filled : (slot + 1) * length] = 1e4
    more = (0.3, torch.tensor([1.0, -2.0, 0.0, 4.0])) if extras else ()
    for window in (None, 30):
        rest = (start, begin, cells, max(counts), max(used), key_dim**-0.5, window, *more)
        expected = packed_attention.packed_attention(query.double(), key.double(), value.double(), *rest)
        on_device = (x.to(device) if isinstance(x, Tensor) else x for x in (query, key, value, *rest))
        fault = _far(module.packed_attention(*on_device), expected, ATTENTION[dtype])
        if fault:
            return f"{fault}, window={window}"
    return None


def _far(found: Tensor, expected: Tensor, allowed: float) -> str | None:
    """Returns a line when two results differ by more than is allowed, or either is not finite."""
    difference = (found.cpu().double() - expected.double()).abs().max().item()
    return None if difference <= allowed else f"off by {difference:.1e}, allowed {allowed:.0e}"


TRIALS: dict[str, Callable[..., str | None]] = {
    "select": try_select,
    "argmax_logprob": try_argmax_logprob,
    "packed_attention": try_attention,
}
