"""Attention of a packed ragged row in Triton: few queries a request against its slot, of any length.

A program takes one request, one K/V head, some rows (queries times the query heads that share the K/V head) and one
part of the slot's cells, with an online softmax. When a slot is split into parts, a second launch joins them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_dcut.kernels.fused.launch import on_device_of
from hf_dcut.kernels.reference.packed_attention import check

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD = 256
# Splitting has to give the programs on each multiprocessor something to do, and each part some blocks of cells.
_PROGRAMS_PER_PROCESSOR, _BLOCKS_PER_PART, _MOST_PARTS = 2, 4, 32


@triton.jit
def _dot(a, b, c, INTERPRETED: tl.constexpr):
    """a b + c, float32."""
    if INTERPRETED:
        # The interpreter multiplies the bits of bfloat16 numbers as if they were integers.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, c, input_precision="ieee")


@triton.jit
def _cap(scores, softcap, SOFTCAP: tl.constexpr):
    """Scores in base 2 before masking."""
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (e^2x + 1), right at both ends.
        scores = softcap * (1.0 - 2.0 / (tl.exp(scores / softcap * 2.0) + 1.0))
    return scores * 1.4426950408889634


@triton.jit
def _related(ancestors, own, mask):
    """Whether queries see cells: all before their request's rows, and of these what `ancestors` says."""
    related = tl.load(ancestors + own[None, :], mask=mask & (own >= 0)[None, :], other=0)
    return (own < 0)[None, :] | (related != 0)


@triton.jit
def _before(cell, own, window, WINDOW: tl.constexpr):
    """Whether queries at the cells `own` see cells: up to their own, and within the window."""
    seen = cell[None, :] <= own[:, None]
    if WINDOW:
        seen &= cell[None, :] > (own - window)[:, None]
    return seen


@triton.jit(do_not_specialize=["window", "parts", "T"])
def attend_kernel(
    query, key, value, start, begin, used, sinks, ancestors, out, weight,
    scaling, softcap, window, parts, T,
    query_row, query_head, key_cell, key_head, value_cell, value_head, ancestors_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_CELLS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ANCESTORS: tl.constexpr, SPLIT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Writes out [T, heads, value dim]; with SPLIT float32 [parts, T, heads, value dim] and their weights' log2."""
    request, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    first = tl.load(start + request)
    count = tl.load(start + request + 1) - first
    cells = tl.load(used + request)
    past = cells - count
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    offset, head = row // GROUP, kv_head * GROUP + row % GROUP
    real, packed = offset < count, (first + offset).to(tl.int64)
    if tl.program_id(1) * BLOCK_ROWS >= count * GROUP:
        return

    low, high = 0, cells
    if not ANCESTORS:
        high = tl.minimum(cells, past + (tl.program_id(1) * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP + 1)
    if WINDOW:
        low = tl.maximum(0, past + tl.program_id(1) * BLOCK_ROWS // GROUP - window + 1)
    if SPLIT:
        part = tl.cdiv(tl.cdiv(high - low, parts), BLOCK_CELLS) * BLOCK_CELLS
        low += tl.program_id(2) * part
        high = tl.minimum(high, low + part)

    dim, value_dim = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE)
    query_address = query + packed[:, None] * query_row + head[:, None] * query_head + dim[None, :]
    q = tl.load(query_address, mask=real[:, None] & (dim < DIM)[None, :], other=0.0)
    slot = tl.load(begin + request).to(tl.int64)
    peak = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    if SINKS:
        # A cell without a value; the first part alone has it.
        if tl.program_id(2) == 0:
            peak = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
            total += 1.0
    gathered = tl.zeros((BLOCK_ROWS, BLOCK_VALUE), tl.float32)

    for block in range(low, high, BLOCK_CELLS):
        cell = block + tl.arange(0, BLOCK_CELLS)
        inside = cell < high
        place = slot + cell
        key_address = key + place[None, :] * key_cell + kv_head * key_head + dim[:, None]
        k = tl.load(key_address, mask=inside[None, :] & (dim < DIM)[:, None], other=0.0)
        scores = tl.zeros((BLOCK_ROWS, BLOCK_CELLS), tl.float32)
        scores = _cap(_dot(q, k, scores, INTERPRETED) * scaling, softcap, SOFTCAP)
        if ANCESTORS:
            related = ancestors + packed[:, None] * ancestors_row
            seen = _related(related, cell - past, real[:, None] & inside[None, :])
        else:
            seen = _before(cell, past + offset, window, WINDOW)
        scores = tl.where(seen & inside[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen nothing yet must not subtract infinity from infinity.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        share, fade = tl.exp2(scores - level[:, None]), tl.exp2(peak - level)
        value_address = value + place[:, None] * value_cell + kv_head * value_head + value_dim[None, :]
        v = tl.load(value_address, mask=inside[:, None] & (value_dim < VALUE_DIM)[None, :], other=0.0)
        gathered = _dot(share.to(v.dtype), v, gathered * fade[:, None], INTERPRETED)
        total = total * fade + tl.sum(share, 1)
        peak = higher

    # Nothing was seen by a row in this part: its peak, and so its weight, is -inf.
    total = tl.where(total == 0.0, 1.0, total)
    gathered /= total[:, None]
    result = packed * (KV_HEADS * GROUP) + head
    if SPLIT:
        result += tl.program_id(2).to(tl.int64) * T * (KV_HEADS * GROUP)
        tl.store(weight + result, peak + tl.log2(total), mask=real)
    out_address = out + result[:, None] * VALUE_DIM + value_dim[None, :]
    tl.store(out_address, gathered.to(out.dtype.element_ty), mask=real[:, None] & (value_dim < VALUE_DIM)[None, :])


@triton.jit(do_not_specialize=["parts", "rows"])
def join_kernel(
    part, weight, out, parts, rows, VALUE_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_PARTS: tl.constexpr
):
    """Writes out [rows, value dim] from its parts [parts, rows, value dim] and their weights' log2 [parts, rows]."""
    row = tl.program_id(0).to(tl.int64)
    index, dim = tl.arange(0, BLOCK_PARTS), tl.arange(0, BLOCK_VALUE)
    place = index.to(tl.int64) * rows + row
    log = tl.load(weight + place, mask=index < parts, other=float("-inf"))
    share = tl.exp2(log - tl.max(log, 0))
    mask = (index < parts)[:, None] & (dim < VALUE_DIM)[None, :]
    values = tl.load(part + place[:, None] * VALUE_DIM + dim[None, :], mask=mask, other=0.0)
    joined = tl.sum(values * share[:, None], 0) / tl.sum(share, 0)
    tl.store(out + row * VALUE_DIM + dim, joined.to(out.dtype.element_ty), mask=dim < VALUE_DIM)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: Tensor,
    begin: Tensor,
    used: Tensor,
    width: int,
    reach: int,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    ancestors: Tensor | None = None,
    parts: int | None = None,
) -> Tensor:
    """Returns what `reference.packed_attention.packed_attention` does, for heads of up to 256.

    Args:
        query, key, value, start, begin, used, width, reach, scaling, window, softcap, sinks, ancestors: as there.
        parts: in how many parts slots are read; None for what fills the device.

    Raises:
        ValueError: a dtype or head size that the kernel does not take, or ancestors with a window.
    """
    check(window, ancestors)
    size = max(key.shape[-1], value.shape[-1])
    if query.dtype not in DTYPES or size > LARGEST_HEAD:
        raise ValueError(
            f"the attention kernel got heads of {size} in {query.dtype}: it takes up to {LARGEST_HEAD} in float16, "
            "bfloat16 and float32. Use path='reference'"
        )
    # The kernel reads the last dimension as consecutive.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    return _attend(
        query, key, value, start, begin, used, width, reach, scaling, window, softcap, sinks, ancestors, parts
    )


@torch.library.custom_op("hf_dcut::packed_attention", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, start: Tensor, begin: Tensor, used: Tensor, width: int, reach: int,
    scaling: float, window: int | None, softcap: float | None, sinks: Tensor | None, ancestors: Tensor | None,
    parts: int | None,
) -> Tensor:  # fmt: skip
    (T, heads, dim), (_, kv_heads, value_dim), requests = query.shape, value.shape, len(used)
    group = heads // kv_heads
    rows, cells, warps = _blocks(query.dtype, max(dim, value_dim), width * group)
    grid = (requests * kv_heads, triton.cdiv(width * group, rows))
    if parts is None:
        parts = _parts(query.device, grid[0] * grid[1], reach, cells)
    split = parts > 1
    out = query.new_empty(T, heads, value_dim)
    part = query.new_empty(parts, T, heads, value_dim, dtype=torch.float32) if split else out
    weight = query.new_empty(parts, T, heads, dtype=torch.float32) if split else out
    block = triton.next_power_of_2(value_dim)
    # What is not asked for is never read; any pointer will do.
    related = used if ancestors is None else ancestors.contiguous().view(torch.int8)
    sinks_or_any = out if sinks is None else sinks.contiguous()
    with on_device_of(query):
        attend_kernel[(*grid, parts)](
            query, key, value, start, begin, used, sinks_or_any, related, part, weight,
            scaling, softcap or 1.0, window or 0, parts, T,
            *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], related.shape[-1],
            KV_HEADS=kv_heads, GROUP=group, DIM=dim, VALUE_DIM=value_dim, BLOCK_ROWS=rows, BLOCK_CELLS=cells,
            BLOCK_DIM=max(16, triton.next_power_of_2(dim)), BLOCK_VALUE=max(16, block),
            WINDOW=window is not None, SOFTCAP=softcap is not None, SINKS=sinks is not None,
            ANCESTORS=ancestors is not None, SPLIT=split,
            INTERPRETED=not isinstance(attend_kernel, triton.JITFunction),
            num_warps=warps, num_stages=2, enable_fp_fusion=True,
        )  # fmt: skip
        if split:
            join_kernel[(T * heads,)](
                part, weight, out, parts, T * heads, VALUE_DIM=value_dim, BLOCK_VALUE=block,
                BLOCK_PARTS=triton.next_power_of_2(parts), enable_fp_fusion=True,
            )  # fmt: skip
    return out


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: object) -> Tensor:
    return query.new_empty(*query.shape[:2], value.shape[-1])


def _blocks(dtype: torch.dtype, size: int, rows: int) -> tuple[int, int, int]:
    """Returns rows and cells of a block and its warps, so that it stays within 99 KiB of shared memory."""
    wide = dtype.itemsize * triton.next_power_of_2(size)
    most, cells, warps = (64, 64, 4) if wide <= 256 else (64, 32, 8) if wide <= 512 else (16, 16, 8)
    return min(most, max(16, triton.next_power_of_2(rows))), cells, warps


def _parts(device: torch.device, programs: int, reach: int, cells: int) -> int:
    """Returns in how many parts slots are read: enough programs for the device, none of them too short."""
    if device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = triton.cdiv(_PROGRAMS_PER_PROCESSOR * processors, programs)
    return max(1, min(wanted, triton.cdiv(reach, cells * _BLOCKS_PER_PART), _MOST_PARTS))
