"""Selection in two launches, the twin of `reference/select.py`, equal to it bit for bit.

A draft's rank is how many drafts go before it, so nothing is sorted. The first launch counts them, one program for some
requests at one depth; as survivals never rise along a row, ranks below the budget are whole prefixes. The second, one
program, weighs the budgets and writes the packed row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_dcut.kernels.fused.launch import on_device_of
from hf_dcut.kernels.reference.select import QUANTUM, Selected

# Requests and drafts of a tile that one program holds.
MOST_REQUESTS, MOST_DRAFTS = 256, 31


@triton.jit
def _load_confidence(confidence, row, depth, offered, stride_row, stride_depth):
    """Confidences of one depth in [0, 1], NaN where not finite and 0 where there is no draft."""
    address = confidence + row.to(tl.int64) * stride_row + depth * stride_depth
    value = tl.load(address, mask=depth < offered, other=0.0).to(tl.float64)
    inside = tl.minimum(tl.maximum(value, 0.0), 1.0)
    return tl.where(tl.abs(value) < float("inf"), inside, float("nan"))


@triton.jit
def _offered(count, room, row, B, D):
    """Drafts of each row that are real and fit; 0 past the last row."""
    real = tl.load(count + row, mask=row < B, other=0)
    fits = tl.load(room + row, mask=row < B, other=0)
    return tl.minimum(tl.maximum(tl.minimum(real, fits), 0), D).to(tl.int32)


@triton.jit(do_not_specialize=["B", "D"])
def rank_kernel(
    confidence, count, room, survival, rank, B, D, stride_row, stride_depth, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes survival float32 [B, D] and rank int32 [B, D] of BLOCK requests at one depth."""
    depth = tl.program_id(0)
    own = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own_offered = _offered(count, room, own, B, D)
    product = tl.full((BLOCK,), 1.0, tl.float64)
    for d in range(depth + 1):
        product *= _load_confidence(confidence, own, d, own_offered, stride_row, stride_depth)
    own_survival = product.to(tl.float32)

    other = tl.arange(0, ROWS)
    offered = _offered(count, room, other, B, D)
    product = tl.full((ROWS,), 1.0, tl.float64)
    ahead = tl.zeros((BLOCK, ROWS), tl.int32)
    for d in range(D):
        product *= _load_confidence(confidence, other, d, offered, stride_row, stride_depth)
        value = product.to(tl.float32)
        better = value[None, :] > own_survival[:, None]
        earlier = (d < depth) | ((d == depth) & (other[None, :] < own[:, None]))
        tied = (value[None, :] == own_survival[:, None]) & earlier
        ahead += ((better | tied) & (d < offered)[None, :]).to(tl.int32)

    place = own.to(tl.int64) * D + depth
    tl.store(survival + place, own_survival, mask=own < B)
    tl.store(rank + place, tl.sum(ahead, 1), mask=own < B)


@triton.jit
def _interpolate(curve, P, total):
    """Seconds of a step of `total` tokens, float64."""
    seconds = tl.load(curve + P)
    for p in range(1, P):
        low, high = tl.load(curve + p - 1), tl.load(curve + p)
        first, last = tl.load(curve + P + p - 1), tl.load(curve + P + p)
        share = tl.minimum((total - low) / (high - low), 1.0)
        seconds = tl.where(total > low, first + share * (last - first), seconds)
    return seconds


@triton.jit
def _choose(rank, parts, budgets, curve, belief, B, C, P, most, QUANTUM: tl.constexpr):
    """Index of the budget with the most expected tokens a second, its packed tokens, and its drafts' parts."""
    best, best_total, best_gain = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    best_rate = tl.full((), -1.0, tl.float64)
    for c in range(C):
        total = tl.minimum(tl.load(budgets + c), most)
        taken = tl.where(rank < total - B, parts, 0)
        gain = tl.sum(tl.sum(taken, 1), 0)
        rate = (B + tl.load(belief) * (gain.to(tl.float64) * QUANTUM)) / _interpolate(curve, P, total.to(tl.float64))
        better = (rate > best_rate) | (c == 0)
        best = tl.where(better, c, best)
        best_total = tl.where(better, total, best_total)
        best_gain = tl.where(better, gain, best_gain)
        best_rate = tl.where(better, rate, best_rate)
    return best, best_total, best_gain


@triton.jit(do_not_specialize=["B", "D", "C", "P"])
def choose_kernel(
    survival, rank, token, count, room, anchor, slot, length, rope, budgets, curve, belief,
    keep, columns, start, used, numbers,
    B, D, C, P, stride_row, stride_depth,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, QUANTUM: tl.constexpr,
):  # fmt: skip
    """Writes all fields of `Selected`. Column 0 of the tiles is the anchor, column k+1 draft k."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    node = column[None, :] - 1
    offered = _offered(count, room, row, B, D)
    valid = (node >= 0) & (node < offered[:, None])
    inside = (row < B)[:, None] & (node >= 0) & (node < D)
    place = row.to(tl.int64)[:, None] * D + node
    own_rank = tl.load(rank + place, mask=valid, other=0)
    own_survival = tl.load(survival + place, mask=valid, other=0.0)
    finite = tl.abs(own_survival) < float("inf")
    parts = (tl.where(finite, own_survival, 0.0).to(tl.float64) * (1.0 / QUANTUM)).to(tl.int64)

    most = B + tl.sum(offered.to(tl.int64), 0)
    # The anchors' and the invalid places' parts are 0, so their rank does not matter.
    best, total, gain = _choose(own_rank, parts, budgets, curve, belief, B, C, P, most, QUANTUM)
    kept = valid & (own_rank < total - B)
    tl.store(keep + place, kept.to(tl.int8), mask=inside)
    broken = tl.sum(tl.sum((valid & (finite == 0)).to(tl.int32), 1), 0)
    tl.store(numbers, best)
    tl.store(numbers + 1, total)
    tl.store(numbers + 2, (broken == 0).to(tl.int64))
    tl.store(numbers + 3, gain)
    tl.store(numbers + 4 + row, offered.to(tl.int64), mask=row < B)

    drafts = tl.sum(kept.to(tl.int32), 1)
    rows = tl.where(row < B, drafts + 1, 0)
    end = tl.cumsum(rows, 0)
    first = end - rows
    own_length = tl.load(length + row, mask=row < B, other=0)
    tl.store(start, 0)
    tl.store(start + 1 + row, end, mask=row < B)
    tl.store(used + row, (own_length + rows).to(tl.int32), mask=row < B)

    own_anchor = tl.load(anchor + row, mask=row < B, other=0)
    own_slot = tl.load(slot + row, mask=row < B, other=0)
    own_rope = tl.load(rope + row, mask=row < B, other=0)
    draft = tl.load(token + row.to(tl.int64)[:, None] * stride_row + node * stride_depth, mask=kept, other=0)
    cell = own_length[:, None] + column[None, :]
    zeros = tl.zeros((ROWS, WIDTH), tl.int64)
    target = columns + first.to(tl.int64)[:, None] + column[None, :]
    mask, places = column[None, :] < rows[:, None], B * (D + 1)
    tl.store(target, tl.where(node < 0, own_anchor[:, None], draft), mask=mask)
    tl.store(target + places, own_slot[:, None] + zeros, mask=mask)
    tl.store(target + 2 * places, cell, mask=mask)
    tl.store(target + 3 * places, cell + own_rope[:, None], mask=mask)
    tl.store(target + 4 * places, node + zeros, mask=mask)

    spare = tl.arange(0, PLACES)
    tl.store(columns + 5 * places + spare, spare.to(tl.int64), mask=spare < places)
    mask = (spare >= tl.sum(rows, 0)) & (spare < places)
    last = tl.zeros((PLACES,), tl.int64)
    last_cell = tl.load(length + B - 1)
    tl.store(columns + spare, last + tl.load(anchor + B - 1), mask=mask)
    tl.store(columns + places + spare, last + tl.load(slot + B - 1), mask=mask)
    tl.store(columns + 2 * places + spare, last + last_cell, mask=mask)
    tl.store(columns + 3 * places + spare, last + last_cell + tl.load(rope + B - 1), mask=mask)
    tl.store(columns + 4 * places + spare, last - 1, mask=mask)


def select(
    confidence: Tensor, token: Tensor, count: Tensor, room: Tensor, anchor: Tensor, slot: Tensor, length: Tensor,
    rope: Tensor, budgets: Tensor, curve: Tensor, belief: Tensor,
) -> Selected:  # fmt: skip
    """Returns what `reference.select.select` does, for up to 256 requests of up to 31 drafts.

    Raises:
        ValueError: more than that.
    """
    rows, depth = confidence.shape
    if not fits(rows, depth):
        raise ValueError(
            f"the selector kernel got {rows} requests of {depth} drafts: it takes 1 to {MOST_REQUESTS} of 1 to "
            f"{MOST_DRAFTS}. Use fewer at once, or path='reference'"
        )
    return Selected(*_select(confidence, token, count, room, anchor, slot, length, rope, budgets, curve, belief))


def fits(rows: int, depth: int) -> bool:
    """Returns whether the kernel takes so many requests and drafts."""
    return 1 <= rows <= MOST_REQUESTS and 1 <= depth <= MOST_DRAFTS


@torch.library.custom_op("hf_dcut::select", mutates_args=())
def _select(
    confidence: Tensor, token: Tensor, count: Tensor, room: Tensor, anchor: Tensor, slot: Tensor, length: Tensor,
    rope: Tensor, budgets: Tensor, curve: Tensor, belief: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (B, D), numbers = confidence.shape, (count, room, anchor, slot, length, rope, budgets, curve, belief)
    count, room, anchor, slot, length, rope, budgets, curve, belief = (x.contiguous() for x in numbers)
    survival = confidence.new_empty(B, D, dtype=torch.float32)
    rank = confidence.new_empty(B, D, dtype=torch.int32)
    rows = triton.next_power_of_2(B)
    block = min(rows, 32)
    # A product and a sum in one instruction would round once where the reference rounds twice.
    options = {"enable_fp_fusion": False, "num_warps": 4 if rows <= 64 else 8}
    with on_device_of(confidence):
        rank_kernel[D, triton.cdiv(B, block)](
            confidence, count, room, survival, rank, B, D, *confidence.stride(), ROWS=rows, BLOCK=block, **options
        )
        result = _empty(confidence, token, count, room, anchor, slot, length, rope, budgets, curve, belief)
        keep, *others = result
        choose_kernel[(1,)](
            survival, rank, token, count, room, anchor, slot, length, rope, budgets, curve, belief,
            keep.view(torch.int8), *others, B, D, len(budgets), curve.shape[1], *token.stride(),
            ROWS=rows, WIDTH=triton.next_power_of_2(D + 1), PLACES=triton.next_power_of_2(B * (D + 1)), QUANTUM=QUANTUM,
            **options,
        )  # fmt: skip
    return result


@_select.register_fake
def _empty(confidence: Tensor, *others: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the fields of `Selected`, not written yet."""
    B, D = confidence.shape
    return (
        confidence.new_empty(B, D, dtype=torch.bool),
        confidence.new_empty(6, B * (D + 1), dtype=torch.int64),
        confidence.new_empty(B + 1, dtype=torch.int32),
        confidence.new_empty(B, dtype=torch.int32),
        confidence.new_empty(4 + B, dtype=torch.int64),
    )
