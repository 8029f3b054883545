"""The likeliest token of each row of logits and its log-probability, in one pass over the logits.

One program a row. Each lane of its block keeps the largest logit it has met, where, and the sum of exponentials below
it; the lanes are joined at the end, so that a row is read once and nothing of its size is written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_dcut.kernels.fused.launch import on_device_of

_BLOCK = 4096


@triton.jit(do_not_specialize=["V"])
def argmax_logprob_kernel(logits, index, logprob, V, stride, BLOCK: tl.constexpr):
    """Writes index int64 [rows] and logprob float32 [rows]."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    place = lane
    for first in range(0, V, BLOCK):
        column = first + lane
        value = tl.load(logits + row * stride + column, mask=column < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, value)
        # A lane that has met nothing yet must not subtract infinity from infinity.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(peak - level) + tl.exp(value - level)
        place = tl.where(value > peak, column, place)
        peak = higher
    best = tl.max(peak, 0)
    level = tl.where(best == float("-inf"), float("nan"), best)
    whole = tl.sum(total * tl.exp(peak - level), 0)
    tl.store(index + row, tl.min(tl.where(peak == best, place, V - 1), 0).to(tl.int64))
    tl.store(logprob + row, -tl.log(whole))


def argmax_logprob(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what `reference.argmax_logprob.argmax_logprob` does. Where a row holds NaN its index is any."""
    index, logprob = _argmax_logprob(logits.flatten(0, -2))
    return index.view(logits.shape[:-1]), logprob.view(logits.shape[:-1])


@torch.library.custom_op("hf_dcut::argmax_logprob", mutates_args=())
def _argmax_logprob(logits: Tensor) -> tuple[Tensor, Tensor]:
    rows, vocabulary = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    index, logprob = _empty(logits)
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(vocabulary))
        with on_device_of(logits):
            argmax_logprob_kernel[(rows,)](
                logits, index, logprob, vocabulary, logits.stride(0), BLOCK=block, num_warps=8, enable_fp_fusion=True
            )
    return index, logprob


@_argmax_logprob.register_fake
def _empty(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns index and log-probability, not written yet."""
    rows = logits.shape[0]
    return logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.float32)
