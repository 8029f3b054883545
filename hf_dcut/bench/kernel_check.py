"""Every kernel against its reference on the device, and its time against what it replaces.

On a GPU at the sizes of a Qwen3-8B-shaped target with D = 15; `tiny` runs the same code in small shapes on any device,
where Triton's interpreter takes the place of a GPU if it is on.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_dcut import kernels
from hf_dcut.attention import PackedAttention
from hf_dcut.budget import positions
from hf_dcut.config import PAPER_RATIOS
from hf_dcut.kernels import paths
from hf_dcut.kernels.trials import ATTENTION, LOGPROB
from hf_dcut.types import Packed

Case = dict[str, Any]
# Logits of rows as long as a vocabulary: their exponentials add up to more rounding than a trial's.
_LOGPROB = 4 * LOGPROB
_WARM_UP = 3
# Says why there is no time left for a case, None while there is.
Late = Callable[[], str | None]


def in_time() -> None:
    """Returns None: there is always time."""


def taken_paths(device: torch.device) -> dict[str, str]:
    """Returns the path that each kernel takes on a device, for bfloat16 heads of 128."""
    return {
        "select": kernels.select_path(device, 64, 15),
        "argmax_logprob": paths.argmax_path(device),
        "packed_attention": kernels.attention_path(device, torch.bfloat16, 128, 128),
    }


def check_kernels(device: torch.device, tiny: bool, late: Late = in_time) -> list[Case]:
    """Returns one entry for each op, path and case: whether it agrees with the reference, and what is wrong if not.

    Entries for which there was no time have the reason under "skipped" instead.
    """
    found: list[Case] = []
    for op, path, case, check in _checks(device, tiny):
        if (why := late()) is not None:
            found.append({"op": op, "path": path, "case": case, "skipped": why})
            continue
        try:
            fault = check()
        except paths.failures() as error:
            # One kernel that does not run must not hide what the others do.
            fault = f"{type(error).__name__}: {error}"
        found.append({"op": op, "path": path, "case": case, "passed": fault is None, "fault": fault})
    return found


def time_kernels(device: torch.device, tiny: bool, repeats: int = 100, late: Late = in_time) -> list[Case]:
    """Returns one entry for each op, path and case with its seconds on the device; "skipped" as in `check_kernels`."""
    found: list[Case] = []
    for op, path, case, run in _runs(device, tiny):
        if (why := late()) is not None:
            found.append({"op": op, "path": path, "case": case, "skipped": why})
            continue
        try:
            seconds = device_seconds(run, device, 2 if tiny else repeats)
        except paths.failures() as error:
            found.append({"op": op, "path": path, "case": case, "fault": f"{type(error).__name__}: {error}"})
        else:
            found.append({"op": op, "path": path, "case": case, **seconds})
    return found


def device_seconds(run: Callable[[], object], device: torch.device, repeats: int = 100) -> dict[str, float]:
    """Returns median and 95th percentile of a call's seconds on a GPU; on a CPU as `host_seconds`.

    The call waits behind a pause of about a millisecond, so that its launches are queued and their overhead is not in.
    """
    if device.type != "cuda":
        return host_seconds(run, device, repeats)
    seconds = []
    for _ in range(repeats + _WARM_UP):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize(device)
        seconds.append(start.elapsed_time(end) / 1e3)
    return _quantiles(seconds)


def host_seconds(run: Callable[[], object], device: torch.device, repeats: int = 100) -> dict[str, float]:
    """Returns median and 95th percentile of the seconds from a call to the end of its work."""
    seconds = []
    for _ in range(repeats + _WARM_UP):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return _quantiles(seconds)


def _quantiles(seconds: list[float]) -> dict[str, float]:
    kept, wanted = torch.tensor(seconds[_WARM_UP:]).double(), torch.tensor([0.5, 0.95]).double()
    p50, p95 = kept.quantile(wanted).tolist()
    return {"p50": p50, "p95": p95}


def runnable(device: torch.device, op: str) -> list[str]:
    """Returns the fused paths of an op that can be called on a device."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
    if device.type != "cuda":
        return ["triton"] if interpreted else []
    return ["varlen", "triton"] if op == "packed_attention" else ["triton"]


def selector_inputs(rows: int, depth: int, device: torch.device, ties: bool = False) -> tuple[Tensor, ...]:
    """Returns random inputs of `kernels.select` with the paper's four budgets; some rows offer fewer drafts."""
    generator = torch.Generator().manual_seed(rows + depth)
    confidence = torch.rand(rows, depth, generator=generator)
    columns = torch.randint(0, 1000, (7, rows), generator=generator)
    columns[:2] %= depth + 2
    budgets = torch.tensor([positions(ratio, rows, depth) for ratio in PAPER_RATIOS])
    curve = torch.stack([budgets.double(), torch.tensor([1.0, 1.1, 1.3, 1.6], dtype=torch.float64)])
    token = torch.randint(0, 1000, (rows, depth), generator=generator)
    given = (
        confidence.mul(4).round() / 4 if ties else confidence,
        token,
        *columns[:6],
        budgets,
        curve,
        torch.ones(1).double(),
    )
    return tuple(x.to(device) for x in given)


class Layer:
    """One layer's attention of a packed row: queries, slots and where they are, random.

    Args:
        rows, depth: B requests of up to D + 1 queries.
        reach: cells of a slot; requests use half of them or more.
        heads: of queries and of K/V.
        dim: size of a head.
        dtype, device: of the states.
    """

    def __init__(
        self,
        rows: int,
        depth: int,
        reach: int,
        heads: tuple[int, int],
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        generator = torch.Generator().manual_seed(0)
        counts = torch.randint(1, depth + 2, (rows,), generator=generator)
        used = torch.randint(reach // 2 + depth + 1, reach + 1, (rows,), generator=generator)
        slot = torch.repeat_interleave(torch.arange(rows), counts)
        start = nn.functional.pad(counts.cumsum(0), (1, 0))
        cell = torch.arange(len(slot)) - start[slot] + (used - counts)[slot]
        self.packed = Packed(
            *(slot * 0, slot, cell, cell, cell * 0, start.int(), used.int(), torch.arange(len(slot))),
            decoding=rows,
            slots=rows,
            reach=reach,
            width=depth + 1,
        ).to(device)

        def states(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.query = states(1, len(slot), heads[0], dim).transpose(1, 2)
        self.key, self.value = (states(rows, reach, heads[1], dim).transpose(1, 2) for _ in range(2))

    def attend(self, path: str, wide: bool = False, **options: Any) -> Tensor:
        """Returns the output [1, T, heads, dim] of a path, computed in float64 if `wide`."""
        query, key, value = (x.double() if wide else x for x in (self.query, self.key, self.value))
        out, _ = PackedAttention(self.packed, path)(nn.Module(), query, key, value, None, **options)
        return out


def _checks(device: torch.device, tiny: bool) -> Iterator[tuple[str, str, str, Callable[[], str | None]]]:
    """Yields op, path, case and a function that returns what is wrong."""
    sizes = ((3, 4),) if tiny else ((1, 15), (64, 15), (255, 30), (256, 31))
    for path in runnable(device, "select"):
        for rows, depth in sizes:
            for ties in (False, True):
                given = selector_inputs(rows, depth, device, ties)
                yield "select", path, f"B={rows} D={depth} ties={ties}", _select_check(path, given)
    for path in runnable(device, "argmax_logprob"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            logits = _logits(6 if tiny else 960, 101 if tiny else 151936, dtype, device)
            yield "argmax_logprob", path, f"{tuple(logits.shape)} {dtype}", _argmax_check(path, logits)
    for path in runnable(device, "packed_attention"):
        for layer, case in _layers(device, tiny, (torch.float32,) if path == "triton" else ()):
            for window in (None, 2 if tiny else 512):
                yield "packed_attention", path, f"{case} window={window}", _attention_check(path, layer, window)


def _runs(device: torch.device, tiny: bool) -> Iterator[tuple[str, str, str, Callable[[], object]]]:
    """Yields op, path, case and a call to be timed. "compiled" is torch.compile of the reference, on GPUs alone."""
    for rows in (2,) if tiny else (1, 8, 16, 32, 64):
        given = selector_inputs(rows, 3 if tiny else 15, device)
        yield from _ways("select", kernels.select, f"B={rows}", given, device)
    for rows in (2,) if tiny else (15, 120, 960):
        logits = _logits(rows, 101 if tiny else 151936, torch.bfloat16, device)
        yield from _ways("argmax_logprob", kernels.argmax_logprob, f"rows={rows}", (logits,), device)
    for layer, case in _layers(device, tiny, ()):
        # "reference" is the padded attention that runs where no kernel does.
        for path in (*runnable(device, "packed_attention"), "reference"):
            yield "packed_attention", path, case, partial(layer.attend, path)


def _ways(
    op: str, function: Callable[..., object], case: str, given: tuple[Tensor, ...], device: torch.device
) -> Iterator[tuple[str, str, str, Callable[[], object]]]:
    """Yields an op's fused paths, its reference, and on a GPU that reference compiled."""
    for path in (*runnable(device, op), "reference"):
        yield op, path, case, partial(function, *given, path=path)
    if device.type == "cuda":
        compiled = torch.compile(partial(function, path="reference"), fullgraph=True)
        yield op, "compiled", case, partial(compiled, *given)


def _layers(device: torch.device, tiny: bool, others: Iterable[torch.dtype]) -> Iterator[tuple[Layer, str]]:
    """Yields layers and their names, in bfloat16 and other dtypes."""
    sizes = ((2, 3, 20),) if tiny else ((1, 15, 2048), (8, 15, 2048), (64, 15, 1024), (1, 15, 32768))
    for dtype in (torch.bfloat16, *others):
        for rows, depth, reach in sizes:
            heads, dim = ((4, 2), 16) if tiny else ((32, 8), 128)
            yield Layer(rows, depth, reach, heads, dim, dtype, device), f"B={rows} reach={reach} {dtype}"


def _logits(rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)).mul(3).to(device, dtype)


def _select_check(path: str, given: tuple[Tensor, ...]) -> Callable[[], str | None]:
    def check() -> str | None:
        found = kernels.select(*given, path=path)
        expected = kernels.select(*(x.cpu() for x in given), path="reference")
        pairs = zip(found._fields, found, expected, strict=True)
        wrong = [name for name, a, b in pairs if not torch.equal(a.cpu(), b)]
        return f"wrong {', '.join(wrong)}" if wrong else None

    return check


def _argmax_check(path: str, logits: Tensor) -> Callable[[], str | None]:
    def check() -> str | None:
        index, logprob = kernels.argmax_logprob(logits, path=path)
        if not torch.equal(index.cpu(), logits.cpu().float().argmax(-1)):
            return "wrong index"
        expected = logits.double().log_softmax(-1).amax(-1)
        return _far(logprob, expected, _LOGPROB)

    return check


def _attention_check(path: str, layer: Layer, window: int | None) -> Callable[[], str | None]:
    def check() -> str | None:
        found = layer.attend(path, sliding_window=window)
        expected = layer.attend("reference", wide=True, sliding_window=window)
        return _far(found, expected, ATTENTION[found.dtype])

    return check


def _far(found: Tensor, expected: Tensor, allowed: float) -> str | None:
    difference = (found.double() - expected).abs().max().item()
    return None if difference <= allowed else f"off by {difference:.1e}, allowed {allowed:.0e}"
