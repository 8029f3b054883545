"""The GPU check in small shapes, on whatever device there is."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from hf_dcut.bench.gpu_check import gpu_check
from hf_dcut.cli import main

OPS = {"select", "argmax_logprob", "packed_attention"}


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def test_small_shapes_pass_and_tell_the_path() -> None:
    result = gpu_check(tiny=True)
    assert json.loads(json.dumps(result)) == result
    assert result["passed"]
    paths = {(entry["op"], entry["path"]) for entry in result["kernels"]["checks"]}
    if not torch.cuda.is_available():
        assert result["attention"] == "packed sdpa"
        assert set(result["paths"].values()) == {"reference"}
        assert paths == {(op, "triton") for op in OPS if has_triton()}, "the interpreter runs them"
    assert all(entry["passed"] and entry["fault"] is None for entry in result["kernels"]["checks"])
    assert {entry["op"] for entry in result["kernels"]["times"]} == OPS
    assert {entry["path"] for entry in result["kernels"]["times"]} >= {"reference"} | {path for _, path in paths}
    assert all(0 < entry["p50"] <= entry["p95"] for entry in result["kernels"]["times"])
    assert {b: set(found) for b, found in result["selection"].items()} == {
        b: {"p50", "p95", "share_p50", "share_p95"} for b in ("1", "2")
    }
    models = {(entry["model"], entry["dtype"]) for entry in result["lossless"]}
    assert models == {
        (model, dtype)
        for model in ("LlamaForCausalLM", "Qwen3ForCausalLM")
        for dtype in ("torch.float32", "torch.bfloat16")
    }
    for entry in result["lossless"]:
        if entry["dtype"] == "torch.float32":
            assert set(entry["equal_rows"].values()) == {entry["rows"]}
    (rows,) = result["costs"]["seconds"].values()
    # D = 3: the plain step, the anchors alone, and the four ratios of B (D + 1) positions.
    assert {b: [int(t) for t in row] for b, row in rows.items()} == {"1": [0, 1, 2, 3, 4], "2": [0, 2, 4, 6, 8]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a machine without a GPU")
def test_full_shapes_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu-check"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
