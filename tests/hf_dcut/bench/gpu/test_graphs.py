"""The comparison of two engines: equal ones agree to the bit, and a difference is found where it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_dcut.assembly import open_engine
from hf_dcut.bench.gpu.clock import Clock
from hf_dcut.bench.gpu.graphs import Pair, compare_around, graphs
from hf_dcut.bench.gpu.rig import Rig
from hf_dcut.config import DCutConfig
from hf_dcut.drafters.base import Drafter
from hf_dcut.engine import Engine
from hf_dcut.stats import Stats


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig(tiny=True)


def opener(spoil: Callable[[Engine], None] = lambda engine: None) -> Any:
    """Returns how two eager engines are opened, of which the first may be spoilt."""

    @contextmanager
    def open_pair(model: PreTrainedModel, drafter: Drafter, slots: int, longest: int) -> Iterator[Pair]:
        config = DCutConfig(budget=0.5)
        options = [model, drafter, config, slots, 1, longest]
        with (
            open_engine(*options, stats=Stats(records=[])) as one,
            open_engine(*options, stats=Stats(records=[])) as other,
        ):
            spoil(one)
            yield Pair(one, other)

    return open_pair


def test_equal_engines_agree(rig: Rig) -> None:
    found = compare_around(rig, Clock(), opener(), bucket=3)
    assert found["passed"]
    assert [(run["rows"], run["steps"]) for run in found["runs"]] == [(2, 4), (3, 4), (4, 4)]
    assert found["skipped"] == []


def test_a_bit_of_a_cell_is_found(rig: Rig) -> None:
    def spoil(engine: Engine) -> None:
        forward = engine.target.forward

        def off(packed: Any, cache: Any) -> Any:
            found = forward(packed, cache)
            keys = cache.layers[2].keys
            keys[packed.slot[0], packed.cell[0]] = torch.nextafter(
                keys[packed.slot[0], packed.cell[0]], torch.tensor(9.0)
            )
            return found

        engine.target.forward = off  # type: ignore[method-assign]

    found = compare_around(rig, Clock(), opener(spoil), bucket=3)
    assert not found["passed"]
    assert found["runs"][0]["fault"].startswith("step 0: keys of layer 2, request 0")


def test_another_budget_is_found(rig: Rig) -> None:
    def spoil(engine: Engine) -> None:
        engine.config = DCutConfig(budget=1.0)

    found = compare_around(rig, Clock(), opener(spoil), bucket=3)
    assert not found["passed"]
    assert "with graphs" in found["runs"][0]["fault"]


def test_steps_without_time_are_told(rig: Rig) -> None:
    found = compare_around(rig, Clock(0.0), opener(), bucket=3)
    assert found["passed"]
    assert [item["what"] for item in found["skipped"]] == ["B = 2", "B = 3", "B = 4"]
    assert found["skipped"][0]["why"] == "no time: 0 s left in this part, 4 steps left"


def test_without_graphs_the_part_says_so(rig: Rig) -> None:
    assert graphs(rig, Clock()) == {"state": "not available", "reason": "not available in this version"}
