"""Steps replayed as CUDA graphs against the same steps run eagerly at the same shapes, bit for bit.

Two engines take the same requests through the same steps. One replays graphs; the other does what the graphs were
recorded from, one kernel after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from hf_dcut.assembly import open_engine
from hf_dcut.bench.gpu.clock import Clock
from hf_dcut.bench.gpu.rig import Rig, made_up_costs
from hf_dcut.bench.gpu.shapes import chain_model, random_prompts
from hf_dcut.budget import positions
from hf_dcut.config import DCutConfig
from hf_dcut.drafters.base import Drafter
from hf_dcut.engine import Engine
from hf_dcut.fixed_step import FixedRow, FixedStep
from hf_dcut.graphs import Graphs, choices_of
from hf_dcut.recording import Recorder, recorder_for
from hf_dcut.requests import Request
from hf_dcut.stats import Stats, StepRecord

# Requests of the runs: their prompts and new tokens. They come and go, so that slots move; steps that read prompts are
# not replayed, so answers are long.
_SHORTEST, _LONGEST, _NEW = 4, 24, 400
# Steps between two looks at all K/V.
_LOOK = 50
# Different requests; they come again and again.
_KINDS = 64
_BUCKET = 16
# Where budgets come from.
_SOURCES = ("last", "read")

T = TypeVar("T")


class CallAgain:
    """In the place of a recorder: what it gives back does everything anew, eagerly."""

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """Returns the function itself."""
        return run

    def bytes(self) -> int:
        """Returns 0: nothing is kept."""
        return 0


class Counted:
    """A recorder whose replays of a step, or of its second half, are counted.

    Args:
        recorder: which.

    Attributes:
        replays: how many there were.
    """

    def __init__(self, recorder: Recorder):
        self.recorder, self.replays = recorder, 0

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """Returns the replay."""
        replay = self.recorder.record(run)

        def counted() -> T:
            result = replay()
            self.replays += isinstance(result, FixedRow)
            return result

        return counted

    def bytes(self) -> int:
        """Returns what the recorder says."""
        return self.recorder.bytes()


@dataclass(frozen=True)
class Pair:
    """Two engines that must do the same, to the bit.

    Attributes:
        graphed: replays CUDA graphs.
        eager: runs the same shapes without; both keep the records of their steps.
        recorder: of the graphs.
    """

    graphed: Engine
    eager: Engine
    recorder: Counted


def graphs(rig: Rig, clock: Clock) -> dict[str, Any]:
    """Returns whether graphs do what eager steps do, for a batch below, at and above a bucket."""
    recorder = recorder_for(rig.device)
    if recorder is None:
        return {"state": "not available", "reason": "CUDA graphs need a CUDA device"}
    return compare_around(rig, clock, recorder, 2 if rig.tiny else _BUCKET)


def compare_around(rig: Rig, clock: Clock, recorder: Recorder, bucket: int) -> dict[str, Any]:
    """Returns the comparison with a request fewer than a graph holds, as many, and one more, for both kinds of budget.

    Args:
        rig: whose sizes count.
        clock: steps that no longer fit are left out, and said.
        recorder: of the engine that replays.
        bucket: requests that graphs are recorded for, and twice as many.
    """
    shape, steps = rig.sizes.graph_shape, rig.sizes.graph_steps
    model = chain_model(shape, rig.device, rig.sizes.dtype)
    prompts = random_prompts(_KINDS, _SHORTEST, _LONGEST, shape["vocab_size"])
    drafter, _ = rig.oracle_drafter(model, rig.random_drafter(model), _LONGEST + _NEW)
    plan, runs = [(source, rows) for source in _SOURCES for rows in (bucket - 1, bucket, bucket + 1)], []
    for source, rows in plan:
        with open_pair(model, drafter, bucket, recorder, source) as pair:
            runs.append({"source": source, "rows": rows, **compare(pair, prompts, rows, steps // len(plan), clock)})
    skipped = [{"what": f"{run['source']}, B = {run['rows']}", "why": run["skipped"]} for run in runs if run["skipped"]]
    return {"bucket": bucket, "runs": runs, "passed": all(run["fault"] is None for run in runs), "skipped": skipped}


@contextmanager
def open_pair(model: PreTrainedModel, drafter: Drafter, bucket: int, recorder: Recorder, source: str) -> Iterator[Pair]:
    """Gives two engines with recorded steps of `bucket` and twice as many requests, at all budgets.

    Budgets are chosen by made-up costs, which do not follow the clock, so both choose alike; `source` says by whose
    drafts, as `DCutConfig.cuda_graph_budget` does.
    """
    slots, depth = 2 * bucket, drafter.draft_tokens
    costs = made_up_costs(slots, depth)
    config = DCutConfig(cost_table=costs, deterministic=True, cuda_graphs=False, cuda_graph_budget=source)
    shapes = [
        (b, t)
        for b in (bucket, slots)
        for t in {0, *(positions(r, b, depth) for r in config.candidates(recorded=True))}
    ]
    with ExitStack() as stack:
        engines, counted = [], Counted(recorder)
        for recording in (counted, CallAgain()):
            sizes = (slots, 1, _LONGEST + _NEW)
            opened = open_engine(model, drafter, config, *sizes, stats=Stats(records=[]))
            engine = stack.enter_context(opened)
            step = FixedStep(engine.target, engine.cache, engine.drafting.drafter, depth)
            engine.replaying.graphs = Graphs(step, shapes, recording, choices_of(config, depth))
            engines.append(engine)
        graphed, eager = engines
        yield Pair(graphed, eager, counted)


def compare(pair: Pair, prompts: list[list[int]], rows: int, steps: int, clock: Clock) -> dict[str, Any]:
    """Returns how many steps two engines took alike, how many were replayed, and what differed first.

    Compared are tokens, drafts kept and accepted, budgets and row lengths at every step, and all K/V in use now and
    then and at the end.
    """
    sources, before = (_requests(prompts), _requests(prompts)), pair.recorder.replays
    found: dict[str, Any] = {"steps": 0, "replayed": 0, "fault": None, "skipped": None}
    for step in range(steps):
        if (why := clock.late()) is not None:
            return {**found, "skipped": f"{why}, {steps - step} steps left"}
        for engine, source in zip((pair.graphed, pair.eager), sources, strict=True):
            while len(engine.roster.live) + len(engine.roster.waiting) < rows:
                engine.roster.add(next(source))
            engine.step()
        found |= {"steps": step + 1, "replayed": pair.recorder.replays - before}
        look = step % _LOOK == 0 or step == steps - 1
        fault = _step_fault(pair) or (_cache_fault(pair) if look else None)
        if fault is not None:
            return {**found, "fault": f"step {step}: {fault}"}
    return found


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
