"""The program that times the kernels, in small shapes: every op, each path that runs here, one JSON line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "kernels" / "bench.py"


@pytest.mark.slow
def test_small_shapes() -> None:
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-P", BENCH, "--tiny"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["tiny"], found["faults"]) == (True, [])
    assert found["checked"] >= 9
    ways = {(entry["op"], entry["path"]) for entry in found["times"]}
    assert ways >= {(op, path) for op in found["paths"] for path in ("triton", "reference")}


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a machine without a GPU")
def test_full_shapes_need_a_gpu() -> None:
    done = subprocess.run([sys.executable, "-P", BENCH], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "needs a CUDA device; --tiny" in done.stderr
