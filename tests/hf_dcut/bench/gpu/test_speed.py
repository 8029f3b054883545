"""Tokens per second with options of ours, in small shapes: what is measured runs, and says what it must."""

from __future__ import annotations

import pytest
import torch

from hf_dcut import compiling
from hf_dcut.bench.gpu import speed
from hf_dcut.bench.gpu.clock import Clock
from hf_dcut.bench.gpu.rig import Rig


@pytest.mark.parametrize("method", ["auto, compiled", "plain, compiled", "auto, read"])
def test_a_rule_with_an_option(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    taken = []
    config = speed.DCutConfig
    monkeypatch.setattr(speed, "DCutConfig", lambda **options: taken.append(options) or config(**options))
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    found = speed._measured(Rig(tiny=True), Clock(), [(2, method)])
    assert found["passed"]
    assert [entry["data"] for entry in found["entries"]] == ([None] if "plain" in method else list(speed._DATA))
    (options,) = taken
    assert options.get("compile", False) == ("compiled" in method)
    assert options.get("cuda_graph_budget", "last") == ("read" if "read" in method else "last")
    torch._dynamo.reset()
