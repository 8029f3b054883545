"""An experiment: one graph that holds several budgets and chooses on the device, by conditional nodes.

    draft -> choose_fixed -> the first is the best: verify at its T
                             the second is the best: verify at its T
                             ..

Then a step's budget is its own, and nothing is read before it is over. Bodies that are not chosen are passed over. Not
every torch records such nodes, and none does before CUDA 12.4: what is there is looked for, one SWITCH node or an IF
node for each budget.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_dcut.assembly import open_engine
from hf_dcut.bench.gpu.clock import Clock
from hf_dcut.bench.gpu.rig import Rig
from hf_dcut.bench.gpu.shapes import chain_model
from hf_dcut.budget import positions
from hf_dcut.config import PAPER_RATIOS, DCutConfig
from hf_dcut.fixed_step import FixedStep
from hf_dcut.graphs import Graphs
from hf_dcut.recording import Recorder, recorder_for
from hf_dcut.trial import TOLERANCE, relative_difference

# Does one of several things: that of the index int64 [1], which it does not read on the host.
Branch = Callable[[Tensor, Sequence[Callable[[], object]]], None]

_ROWS, _CELLS, _REPEATS = 16, 256, 20


def conditional(rig: Rig, clock: Clock) -> dict[str, Any]:
    """Returns whether one graph with a branch for each budget does what two and a read do, and the seconds of both."""
    recorder = recorder_for(rig.device)
    if recorder is None:
        return {"state": "not available", "reason": "CUDA graphs need a CUDA device"}
    if not hasattr(torch.cuda.CUDAGraph, "begin_capture_to_if_node"):
        return {"state": "not available", "reason": f"torch {torch.__version__} records no conditional nodes"}
    return compare_ways(rig, recorder, one_of)


def one_of(index: Tensor, bodies: Sequence[Callable[[], object]]) -> None:
    """Records what several functions do into bodies of which a replay runs one; elsewhere all of them just run."""
    if not torch.cuda.is_current_stream_capturing():
        for body in bodies:
            body()
        return
    graph: Any = torch.cuda.CUDAGraph.get_currently_capturing_graph()
    if hasattr(graph, "begin_capture_to_switch_node"):
        graph.begin_capture_to_switch_node(index, len(bodies))
        for number, body in enumerate(bodies):
            if number:
                graph.begin_capture_to_next_conditional_body()
            body()
        graph.end_capture_to_conditional_node()
        return
    for number, body in enumerate(bodies):
        graph.begin_capture_to_if_node(index[0] == number)
        body()
        graph.end_capture_to_conditional_node()


def compare_ways(rig: Rig, recorder: Recorder, branch: Branch) -> dict[str, Any]:
    """Returns an entry for each budget: its T, whether both ways come to the same, and the seconds of each.

    Args:
        rig: whose sizes count.
        recorder: of all graphs.
        branch: records the branches of the one graph.
    """
    model = chain_model(rig.sizes.graph_shape, rig.device, rig.sizes.dtype)
    drafter, rows = rig.random_drafter(model), 2 if rig.tiny else _ROWS
    depth, config = drafter.draft_tokens, DCutConfig(budget=1.0, cuda_graphs=False)
    totals = [positions(ratio, rows, depth) for ratio in PAPER_RATIOS]
    with torch.no_grad(), open_engine(model, drafter, config, rows, 1, _CELLS) as engine:
        step = FixedStep(engine.target, engine.cache, engine.drafting.drafter, depth)
        graphs = Graphs(step, [(rows, total) for total in totals], recorder, len(totals))
        inputs, drafts = graphs.inputs[rows], graphs.inputs[rows].drafts
        assert drafts is not None, "steps that choose keep their drafts"
        # Requests of half the cells, with room for all drafts and anchors of their own.
        inputs.columns[1], inputs.columns[2], inputs.columns[3] = _CELLS // 2, inputs.columns[0] + 3, depth

        def whole() -> Tensor:
            best = step.draft(inputs.columns, inputs.menu, drafts)
            branch(best, [partial(step, inputs.columns, total, drafts) for total in totals])
            return best

        def in_two() -> int:
            best = int(graphs.drafting[rows]())
            graphs.replays[rows, totals[best]]()
            return best

        try:
            one = recorder.record(whole)
        except RuntimeError as error:
            return {"state": "not available", "reason": f"torch {torch.__version__} cannot record it: {error}"}
        entries = [_entry(rig, step, inputs.menu, totals, index, lambda: int(one()), in_two) for index in range(4)]
    return {"B": rows, "entries": entries, "passed": all(entry["same"] for entry in entries), "skipped": []}


def _entry(
    rig: Rig,
    step: FixedStep,
    menu: Tensor,
    totals: list[int],
    index: int,
    in_one: Callable[[], int],
    in_two: Callable[[], int],
) -> dict[str, Any]:
    """Returns the entry of one budget, which costs so little that it is the best."""
    seconds = [1e-3 if other == index else 1.0 for other in range(len(totals))]
    menu.copy_(torch.tensor([totals, seconds, [1.0] * len(totals)], dtype=menu.dtype))
    assert step.logits is not None
    logits, chosen = [], []
    for way in (in_two, in_one):
        step.logits.zero_()
        chosen.append(way())
        logits.append(step.logits.clone())
    expected, found = logits
    close = relative_difference(found, expected) <= TOLERANCE[found.dtype]
    return {
        "T": totals[index],
        "same": chosen == [index, index] and close,
        "one_graph": _seconds(rig, in_one),
        "two_graphs_and_a_read": _seconds(rig, in_two),
    }


def _seconds(rig: Rig, way: Callable[[], int]) -> float:
    """Returns the median seconds of a step, at the end of which the host has what it chose."""
    times = []
    for _ in range(2 if rig.tiny else _REPEATS):
        begin = time.perf_counter()
        way()
        if rig.device.type == "cuda":
            torch.cuda.synchronize(rig.device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
