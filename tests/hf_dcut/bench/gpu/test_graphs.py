"""The comparison of two engines: equal ones agree to the bit, and a difference is found where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_dcut.bench.gpu import graphs as module
from hf_dcut.bench.gpu.clock import Clock
from hf_dcut.bench.gpu.graphs import CallAgain, compare_around, graphs
from hf_dcut.bench.gpu.rig import Rig
from hf_dcut.fixed_step import FixedRow


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig(tiny=True)


class Spoiling(CallAgain):
    """A recorder whose replays do something else, each in its own way."""

    def __init__(self, spoil: Callable[[FixedRow], None]):
        self.spoil = spoil

    def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
        def replay() -> Any:
            row = run()
            if isinstance(row, FixedRow):
                self.spoil(row)
            return row

        return replay


def test_equal_engines_agree(rig: Rig) -> None:
    found = compare_around(rig, Clock(), CallAgain(), bucket=3)
    assert found["passed"]
    shape = [(run["source"], run["rows"], run["steps"]) for run in found["runs"]]
    assert shape == [(source, rows, 4) for source in ("last", "read") for rows in (2, 3, 4)]
    # The first step reads prompts, the next is the first that drafts.
    assert [run["replayed"] for run in found["runs"]] == [2, 2, 2, 3, 3, 3]
    assert found["skipped"] == []


def test_another_token_is_found(rig: Rig) -> None:
    def spoil(row: FixedRow) -> None:
        row.likeliest.next.add_(1).remainder_(512)

    found = compare_around(rig, Clock(), Spoiling(spoil), bucket=3)
    assert not found["passed"]
    assert found["runs"][0]["fault"].startswith("step 2: tokens of request 0")


def test_a_bit_of_a_cell_is_found(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_dcut.bench.gpu.graphs._LOOK", 1)

    def touch(row: FixedRow) -> None:
        keys = caches[-2].layers[2].keys
        keys[row.packed.slot[0], row.packed.cell[0]] = torch.nextafter(
            keys[row.packed.slot[0], row.packed.cell[0]], torch.tensor(9.0)
        )

    caches = []
    original = module.FixedStep

    def fixed_step(target: object, cache: object, *others: object) -> object:
        caches.append(cache)
        return original(target, cache, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "FixedStep", fixed_step)
    found = compare_around(rig, Clock(), Spoiling(lambda row: touch(row) if len(caches) % 2 == 0 else None), bucket=3)
    assert not found["passed"]
    assert found["runs"][0]["fault"].startswith("step 2: keys of layer 2, request 0")


def test_steps_without_time_are_told(rig: Rig) -> None:
    found = compare_around(rig, Clock(0.0), CallAgain(), bucket=3)
    assert found["passed"]
    assert [item["what"] for item in found["skipped"]] == [f"{s}, B = {b}" for s in ("last", "read") for b in (2, 3, 4)]
    assert found["skipped"][0]["why"] == "no time: 0 s left in this part, 4 steps left"


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a machine without a GPU")
def test_without_a_gpu_the_part_says_so(rig: Rig) -> None:
    assert graphs(rig, Clock()) == {"state": "not available", "reason": "CUDA graphs need a CUDA device"}
