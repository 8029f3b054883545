"""`hf-dcut gpu-check`: what a GPU must show, in eight minutes and without network.

    device       what it runs on, and the path each op takes there
    kernels      every kernel against its reference on the device
    exact        answers of a random model in SmolLM2-135M's shape against plain `generate`, float32 and bfloat16
    costs        the paper's table 3 on a random model in Qwen3-8B's shape, beside targets and floors
    selection    seconds of scores, budget and packing, and their share of a step
    graphs       steps replayed as CUDA graphs against eager ones, bit for bit
    speed        tokens per second with an oracle's drafts, beside plain `generate`: synthetic
    times        seconds of every kernel beside its reference, torch.compile of that, and the library
    compiled     tokens per second with compiled norms and MLPs, and of plain `generate` with a compiled forward
    conditional  an experiment: one graph that chooses its budget on the device, beside two and a read

Each part has a share of the time; what no longer fits is told with the reason. `tiny=True` runs the same code in small
shapes on any device.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from hf_dcut import __version__
from hf_dcut.bench.gpu.conditional import conditional
from hf_dcut.bench.gpu.costs import costs
from hf_dcut.bench.gpu.exact import exact
from hf_dcut.bench.gpu.graphs import graphs
from hf_dcut.bench.gpu.kernels import device, kernels, times
from hf_dcut.bench.gpu.report import page
from hf_dcut.bench.gpu.rig import Rig
from hf_dcut.bench.gpu.selection import selection
from hf_dcut.bench.gpu.speed import compiled, speed
from hf_dcut.bench.gpu.supervisor import GRACE, Part, Result, results, send, supervise
from hf_dcut.bench.machine import commit as head

# What matters most comes first. Shares are about the seconds of eight minutes.
PARTS = (
    Part("device", 40, device),
    Part("kernels", 60, kernels),
    Part("exact", 60, exact),
    Part("costs", 60, costs),
    Part("selection", 5, selection),
    Part("graphs", 40, graphs),
    Part("speed", 75, speed),
    Part("times", 45, times),
    Part("compiled", 70, compiled),
    Part("conditional", 10, conditional),
)
NAMES = tuple(part.name for part in PARTS)
MINUTES = 8.0
# Seconds until this module runs: the imports of torch and Transformers.
_IMPORTS = 15.0


def gpu_check(
    out: Path | None = None,
    tiny: bool = False,
    minutes: float = MINUTES,
    parts: Sequence[str] = NAMES,
    commit: str | None = None,
    apart: bool = True,
) -> dict[str, Any]:
    """Returns the results, JSON-able, which are also written after every part.

    Args:
        out: JSON file; the page goes beside it, with the suffix .md. None writes nothing.
        tiny: small shapes; else a CUDA device is needed.
        minutes: for everything.
        parts: names of those to run, in any order.
        commit: of the sources; asked of git if None.
        apart: whether parts run in a process of their own.

    Raises:
        ValueError: no CUDA device, unless `tiny`; unknown parts; no time.
    """
    if not tiny and not torch.cuda.is_available():
        raise ValueError("gpu-check needs a CUDA device: run it on one, or pass --tiny to try it in small shapes")
    unknown = [name for name in parts if name not in NAMES]
    if unknown or not parts:
        raise ValueError(f"parts {', '.join(unknown) or '(none)'}: give some of {', '.join(NAMES)}")
    if not minutes * 60 > 2 * (GRACE + _IMPORTS):
        raise ValueError(f"minutes={minutes:g}: give at least one")
    chosen = [part for part in PARTS if part.name in parts]
    begin = time.monotonic()
    ends = _ends(chosen, begin, minutes * 60 - GRACE - _IMPORTS)
    found: dict[str, Any] = {"version": __version__, "commit": commit or head(), "tiny": tiny, "minutes": minutes}
    found["parts"] = {}
    for name, result in _run(chosen, tiny, ends, apart):
        found["parts"][name] = result
        print(f"{name}: {result['state']}", file=sys.stderr, flush=True)
        found |= _verdict(found["parts"]) | {"seconds": time.monotonic() - begin}
        if out is not None:
            _write(out, found)
    return found


def _ends(parts: Sequence[Part], begin: float, seconds: float) -> dict[str, float]:
    """Returns by when each part must be done: time that one leaves is the next one's."""
    whole, used, ends = sum(part.share for part in parts), 0.0, {}
    for part in parts:
        used += part.share
        ends[part.name] = begin + seconds * used / whole
    return ends


def _run(parts: Sequence[Part], tiny: bool, ends: Mapping[str, float], apart: bool) -> Iterator[tuple[str, Result]]:
    if not apart:
        return results(parts, Rig(tiny), ends)
    return supervise([part.name for part in parts], ends, partial(_serve, tiny=tiny, ends=ends))


def _serve(connection: Connection, names: Sequence[str], tiny: bool, ends: Mapping[str, float]) -> None:
    """Runs parts in a worker and sends what they find."""
    send(connection, results([part for part in PARTS if part.name in names], Rig(tiny), ends))


def _verdict(parts: Mapping[str, Result]) -> dict[str, Any]:
    """Returns whether all that ran passed, and all that did not run, with the reasons."""
    skipped = [{"what": name, "why": result["reason"]} for name, result in parts.items() if result["state"] != "done"]
    for name, result in parts.items():
        skipped += [{"what": f"{name}: {item['what']}", "why": item["why"]} for item in result.get("skipped", ())]
    return {"passed": all(result.get("passed", True) for result in parts.values()), "skipped": skipped}


def _write(out: Path, found: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    out.with_suffix(".md").write_text(page(found))
