"""Steps replayed as CUDA graphs against the same steps run eagerly on the same buckets, bit for bit.

All this file has to know of graphs is `Pair`: two engines over the same model and drafter, of which one replays graphs
and the other runs the very same padded shapes one kernel after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_dcut.bench.gpu.clock import Clock
from hf_dcut.bench.gpu.rig import Rig
from hf_dcut.bench.gpu.shapes import chain_model, random_prompts
from hf_dcut.drafters.base import Drafter
from hf_dcut.engine import Engine
from hf_dcut.requests import Request
from hf_dcut.stats import StepRecord

# Requests of the runs: their prompts and new tokens. They come and go, so that slots move.
_SHORTEST, _LONGEST, _NEW = 4, 24, 40
# Steps between two looks at all K/V.
_LOOK = 50
# Different requests; they come again and again.
_KINDS = 64
_BUCKET = 16


@dataclass(frozen=True)
class Pair:
    """Two engines that must do the same, to the bit.

    Attributes:
        graphed: replays CUDA graphs.
        eager: runs the same buckets without. Both keep the records of their steps, and choose budgets by one table of
            costs that does not follow the clock (`DCutConfig(deterministic=True)`).
    """

    graphed: Engine
    eager: Engine


# From model, drafter, slots and longest request to a pair.
OpenPair = Callable[[PreTrainedModel, Drafter, int, int], AbstractContextManager[Pair]]


def graph_pairs() -> OpenPair | None:
    """Returns how a pair is opened; None, as the engine of this version has no graphs."""
    return None


def graphs(rig: Rig, clock: Clock) -> dict[str, Any]:
    """Returns whether graphs do what eager steps do, for a batch below, at and above a bucket."""
    open_pair = graph_pairs()
    if open_pair is None:
        return {"state": "not available", "reason": "not available in this version"}
    return compare_around(rig, clock, open_pair, 2 if rig.tiny else _BUCKET)


def compare_around(rig: Rig, clock: Clock, open_pair: OpenPair, bucket: int) -> dict[str, Any]:
    """Returns the comparison with one request fewer than a bucket, as many, and one more.

    Args:
        rig: whose sizes count.
        clock: steps that no longer fit are left out, and said.
        open_pair: from model, drafter, slots and longest request to two engines.
        bucket: requests that graphs are recorded for.
    """
    shape, steps = rig.sizes.graph_shape, rig.sizes.graph_steps
    model = chain_model(shape, rig.device, rig.sizes.dtype)
    prompts = random_prompts(_KINDS, _SHORTEST, _LONGEST, shape["vocab_size"])
    drafter, _ = rig.oracle_drafter(model, rig.random_drafter(model), _LONGEST + _NEW)
    runs = []
    for rows in (bucket - 1, bucket, bucket + 1):
        with open_pair(model, drafter, rows, _LONGEST + _NEW) as pair:
            runs.append({"rows": rows, **compare(pair, prompts, steps // 3, clock)})
    skipped = [{"what": f"B = {run['rows']}", "why": run["skipped"]} for run in runs if run["skipped"]]
    return {"bucket": bucket, "runs": runs, "passed": all(run["fault"] is None for run in runs), "skipped": skipped}


def compare(pair: Pair, prompts: list[list[int]], steps: int, clock: Clock) -> dict[str, Any]:
    """Returns how many steps two engines took alike, and what differed first; None when nothing did.

    Compared are tokens, drafts kept and accepted, budgets and row lengths at every step, and all K/V in use now and
    then and at the end.
    """
    ours, theirs = _requests(prompts), _requests(prompts)
    for step in range(steps):
        if (why := clock.late()) is not None:
            return {"steps": step, "fault": None, "skipped": f"{why}, {steps - step} steps left"}
        for engine, source in ((pair.graphed, ours), (pair.eager, theirs)):
            while len(engine.roster.live) + len(engine.roster.waiting) < engine.cache.slots:
                engine.roster.add(next(source))
            engine.step()
        look = step % _LOOK == 0 or step == steps - 1
        fault = _step_fault(pair) or (_cache_fault(pair) if look else None)
        if fault is not None:
            return {"steps": step + 1, "fault": f"step {step}: {fault}", "skipped": None}
    return {"steps": steps, "fault": None, "skipped": None}


def _requests(prompts: list[list[int]]) -> Iterator[Request]:
    """Yields requests without end, some shorter than others."""
    for number in count():
        new = _NEW - number % 7
        yield Request(id=number, prompt=prompts[number % len(prompts)], max_new_tokens=new, seed=number)


def _step_fault(pair: Pair) -> str | None:
    """Returns what differs in the last step."""
    for name in ("requests", "drafted", "kept", "accepted", "committed", "budget", "total"):
        one, other = (getattr(_last(engine), name) for engine in (pair.graphed, pair.eager))
        if one != other:
            return f"{name} {one} with graphs, {other} without"
    for one, other in zip(pair.graphed.roster.live, pair.eager.roster.live, strict=True):
        if one.tokens != other.tokens:
            return f"tokens of request {one.id}"
    return None


def _last(engine: Engine) -> StepRecord:
    assert engine.stats.records, "both engines keep their records"
    return engine.stats.records[-1]


def _cache_fault(pair: Pair) -> str | None:
    """Returns where K/V in use differ."""
    layers = zip(pair.graphed.cache.layers, pair.eager.cache.layers, strict=True)
    for index, (one, other) in enumerate(layers):
        for request in pair.graphed.roster.live:
            used = (request.slot, slice(request.length))
            for name in ("keys", "values"):
                if not torch.equal(getattr(one, name)[used], getattr(other, name)[used]):
                    return f"{name} of layer {index}, request {request.id}"
    return None
