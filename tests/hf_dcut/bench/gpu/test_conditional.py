"""One graph for several budgets, with a stand-in that branches on the host: what is compared is found equal, or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hf_dcut.bench.gpu import conditional as module
from hf_dcut.bench.gpu.clock import Clock
from hf_dcut.bench.gpu.conditional import compare_ways, conditional, one_of
from hf_dcut.bench.gpu.graphs import CallAgain
from hf_dcut.bench.gpu.rig import Rig


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig(tiny=True)


Bodies = Sequence[Callable[[], object]]


def on_host(index: torch.Tensor, bodies: Bodies) -> None:
    bodies[int(index)]()


def none(index: torch.Tensor, bodies: Bodies) -> None:
    pass


def the_last(index: torch.Tensor, bodies: Bodies) -> None:
    bodies[-1]()


def test_one_graph_and_two_come_to_the_same(rig: Rig) -> None:
    found = compare_ways(rig, CallAgain(), on_host)
    assert found["passed"]
    # B = 2 and D = 3.
    assert [entry["T"] for entry in found["entries"]] == [2, 4, 6, 8]
    assert all(entry["one_graph"] > 0 < entry["two_graphs_and_a_read"] for entry in found["entries"])


@pytest.mark.parametrize("wrong", [none, the_last])
def test_a_branch_that_is_taken_wrongly_is_found(rig: Rig, wrong: Callable[..., None]) -> None:
    assert not compare_ways(rig, CallAgain(), wrong)["passed"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a machine without a GPU")
def test_where_there_is_none_it_says_so(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert conditional(rig, Clock())["reason"] == "CUDA graphs need a CUDA device"
    monkeypatch.setattr(module, "recorder_for", lambda device: CallAgain())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    expected = {"state": "not available", "reason": f"torch {torch.__version__} records no conditional nodes"}
    assert conditional(rig, Clock()) == expected


class Running(CallAgain):
    """What is recorded runs, as it does before a recording."""

    def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
        run()
        return run


def test_what_cannot_be_recorded_is_told(rig: Rig) -> None:
    def fail(index: torch.Tensor, bodies: Bodies) -> None:
        raise RuntimeError("CUDA 12.4 is needed")

    found = compare_ways(rig, Running(), fail)
    reason = f"torch {torch.__version__} cannot record it: CUDA 12.4 is needed"
    assert found == {"state": "not available", "reason": reason}


class IfNodes:
    """In the place of a graph that records: notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def begin_capture_to_if_node(self, condition: torch.Tensor) -> None:
        self.asked.append(condition.item())

    def end_capture_to_conditional_node(self) -> None:
        self.asked.append("end")


class SwitchNodes(IfNodes):
    """The same of a torch with SWITCH nodes."""

    def begin_capture_to_switch_node(self, index: torch.Tensor, count: int) -> None:
        self.asked.append((index.tolist(), count))

    def begin_capture_to_next_conditional_body(self) -> None:
        self.asked.append("next")


@pytest.mark.parametrize(
    ("graph", "asked"),
    [
        (IfNodes(), [False, "body 0", "end", True, "body 1", "end", False, "body 2", "end"]),
        (SwitchNodes(), [([1], 3), "body 0", "next", "body 1", "next", "body 2", "end"]),
    ],
)
def test_the_nodes_that_a_torch_has_are_used(
    graph: IfNodes, asked: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [lambda number=number: graph.asked.append(f"body {number}") for number in range(3)]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    one_of(torch.tensor([1]), bodies)
    assert graph.asked == ["body 0", "body 1", "body 2"], "before the recording all run"
    graph.asked.clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "get_currently_capturing_graph", lambda: graph, raising=False)
    one_of(torch.tensor([1]), bodies)
    assert graph.asked == asked
