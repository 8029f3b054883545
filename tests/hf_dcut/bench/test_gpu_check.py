"""The GPU check in small shapes, on whatever device there is, and its page."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dcut.bench import gpu_check as module
from hf_dcut.bench.gpu.supervisor import Part
from hf_dcut.bench.gpu_check import NAMES, gpu_check
from hf_dcut.cli import main

OPS = {"select", "argmax_logprob", "packed_attention"}
CPU = not torch.cuda.is_available()

pytestmark = pytest.mark.slow


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a whole check in small shapes."""
    path = tmp_path_factory.mktemp("check") / "gpu_check.json"
    gpu_check(path, tiny=True, apart=False, commit="abc1234")
    return path


@pytest.fixture(scope="module")
def found(out: Path) -> dict[str, Any]:
    return json.loads(out.read_text())


def test_every_part_passes_or_says_why_not(found: dict[str, Any]) -> None:
    assert (found["passed"], found["commit"], found["tiny"]) == (True, "abc1234", True)
    assert tuple(found["parts"]) == NAMES
    states = {name: part["state"] for name, part in found["parts"].items()}
    on_gpu = {"compiled": "compiled on CUDA devices only"}
    on_gpu |= dict.fromkeys(("graphs", "conditional"), "CUDA graphs need a CUDA device")
    missing = {name: on_gpu[name] for name in NAMES if name in on_gpu} if CPU else {}
    assert {name: found["parts"][name]["reason"] for name, state in states.items() if state != "done"} == missing
    assert found["skipped"] == [{"what": name, "why": why} for name, why in missing.items()]


def test_it_tells_the_machine_and_the_path_of_each_op(found: dict[str, Any]) -> None:
    device = found["parts"]["device"]
    assert {"torch", "transformers", "triton", "cuda", "gpu", "python"} <= set(device["machine"])
    assert "varlen_attn" in device["features"]
    assert set(device["paths"]) == OPS
    if CPU:
        assert set(device["paths"].values()) == {"reference"}
        assert found["parts"]["costs"]["attention"] == "packed sdpa"


def test_kernels_are_checked_and_timed(found: dict[str, Any]) -> None:
    checks, times = found["parts"]["kernels"]["checks"], found["parts"]["times"]["times"]
    paths = {(entry["op"], entry["path"]) for entry in checks}
    if CPU:
        assert paths == {(op, "triton") for op in OPS if has_triton()}, "the interpreter runs them"
    assert all(entry["passed"] and entry["fault"] is None for entry in checks)
    assert {entry["op"] for entry in times} == OPS
    assert {entry["path"] for entry in times} >= {"reference"} | {path for _, path in paths}
    assert all(0 < entry["p50"] <= entry["p95"] for entry in times)


def test_answers_are_compared_in_both_dtypes(found: dict[str, Any]) -> None:
    part = found["parts"]["exact"]
    cases = {(e["dtype"], e["drafter"], e["budget"]) for e in part["entries"]}
    assert len(cases) == len(part["entries"]) == 2 * 2 * 7
    assert all(e["equal"] + e["ties"] == 4 and e["mismatches"] == 0 for e in part["entries"])
    assert all(e["equal"] == 4 for e in part["entries"] if e["dtype"] == "torch.float32")
    assert all(share < 0.5 for share in part["close_tokens"].values()), "else hardly any difference would show"
    accepted = {e["accepted_a_step"] for e in part["entries"] if (e["drafter"], e["budget"]) == ("oracle", "1.0")}
    assert all(tokens > 1.2 for tokens in accepted)


def test_costs_stand_beside_their_floors(found: dict[str, Any]) -> None:
    costs = found["parts"]["costs"]
    # D = 3: the four ratios of B (D + 1) positions.
    assert [(c["B"], c["T"]) for c in costs["cells"]] == [(1, t) for t in (1, 2, 3, 4)] + [(2, t) for t in (2, 4, 6, 8)]
    for cell in (*costs["cells"], *costs["plain"]):
        assert 0 < max(cell["bandwidth_floor"], cell["flop_floor"]) <= cell["floor"] < cell["seconds"]
    assert costs["margin"] > 1
    assert [row["B"] for row in found["parts"]["selection"]["rows"]] == [1, 2]
    assert all(0 < row["p50"] <= row["p95"] for row in found["parts"]["selection"]["rows"])


def test_speeds_are_labelled_synthetic(found: dict[str, Any]) -> None:
    entries = found["parts"]["speed"]["entries"]
    drafted = {(e["method"], e["data"]) for e in entries if e["data"]}
    assert drafted == {
        (m, d) for m in ("1.0", "0.25", "0.5", "auto", "auto, read") for d in ("gsm8k", "mt-bench", "humaneval")
    }
    assert {e["method"] for e in entries if not e["data"]} == {"generate", "plain"}
    assert all(e["synthetic"] == bool(e["data"]) and e["right"] == e["answers"] == 2 for e in entries)
    assert found["parts"]["speed"]["note"].startswith("synthetic")


def test_the_page_shows_it_all(out: Path, found: dict[str, Any]) -> None:
    page = out.with_suffix(".md").read_text()
    assert "commit abc1234; small shapes" in page
    assert "**Passed**" in page
    assert not CPU or "- graphs: CUDA graphs need a CUDA device" in page
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert len(headings) == len([p for p in found["parts"].values() if p["state"] == "done"]), "device has none"
    assert "| 1.0, gsm8k (synthetic) " in page


@pytest.mark.skipif(not CPU, reason="asks for a machine without a GPU")
def test_full_shapes_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu-check"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--parts", "kernels,magic"], "parts magic: give some of device"), (["--minutes", "0.1"], "give at least one")],
)
def test_bad_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["gpu-check", "--tiny", "--out", str(tmp_path / "x.json"), *options]) == 2
    assert message in capsys.readouterr().err


def test_a_part_that_finds_a_fault_fails_the_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bad = {"passed": False, "skipped": [{"what": "B = 7", "why": "no time"}]}
    parts = (Part("device", 1, lambda rig, clock: dict(bad)), Part("times", 1, lambda rig, clock: {"passed": True}))
    monkeypatch.setattr(module, "PARTS", parts)
    monkeypatch.setattr("hf_dcut.bench.gpu.report._SHOWN", {})
    result = gpu_check(tmp_path / "x.json", tiny=True, apart=False)
    assert not result["passed"]
    assert result["skipped"] == [{"what": "device: B = 7", "why": "no time"}]
    assert "**FAILED**, 1 things left out" in (tmp_path / "x.md").read_text()


def test_the_command_runs_parts_in_a_process_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deep" / "x.json"
    assert main(["gpu-check", "--tiny", "--parts", "device,graphs", "--out", str(path)]) == 0
    assert "| graphs | " in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert {name: part["state"] for name, part in found["parts"].items()} == {
        "device": "done",
        "graphs": "not available" if CPU else "done",
    }
