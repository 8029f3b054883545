"""The page says what went wrong and what was left out."""

from __future__ import annotations

from typing import Any

from hf_dcut.bench.gpu.report import page

FLOORS = {"bandwidth_floor": 0.0046, "flop_floor": 0.001, "floor": 0.0047}


def show(**parts: dict[str, Any]) -> str:
    found = {"version": "1.0", "commit": None, "tiny": False, "minutes": 8.0, "seconds": 12.3}
    return page({**found, "passed": False, "skipped": [{"what": "a", "why": "no time"}], "parts": parts})


def done(**values: Any) -> dict[str, Any]:
    return {"state": "done", "seconds": 1.0, "passed": True, "skipped": [], **values}


def test_parts_that_failed_have_their_reason() -> None:
    text = show(kernels={"state": "failed", "reason": "its process ended with -11", "passed": False})
    assert "commit unknown; 8 minutes at most; 12 s. **FAILED**, 1 things left out." in text
    assert "- kernels: its process ended with -11" in text
    assert "## Kernels" not in text
    assert "| a    | no time |" in text


def test_a_cell_has_measured_target_floor_and_paper() -> None:
    cell = {"B": 8, "share": 0.25, "T": 32, "seconds": 0.0071, "target": 0.0063, "paper": 0.008363, **FLOORS}
    others = [{**cell, "share": share} for share in (0.5, 0.75, 1.0)]
    plain = {"B": 8, "seconds": 0.006, **FLOORS, "over_floor": 1.3, "limit": 1.4, "within": True}
    ceilings = {"bytes_per_second": 4.1e12, "flops_per_second": 7.3e14, "source": "measured in this run"}
    facts = {
        "dtype": "bf16",
        "draft_tokens": 15,
        "drafter_layers": 5,
        "kv_length": 1024,
        "attention": "varlen",
        "graphed": [8],
    }
    text = show(costs=done(cells=[cell, *others], plain=[plain], ceilings=ceilings, targets=21, targets_met=1, **facts))
    assert "| 8 | 7.1 / 6.3 / 4.7 (8.4) |" in text
    assert "varlen, replayed as CUDA graphs at B = 8. Each cell" in text
    assert "by 4.10 TB/s and 730 TFLOP/s, measured in this run. Targets met: 1 of 21." in text
    assert "| 8 | 6.00     | 4.60            | 1.00       | 1.30 (at most 1.4) |" in text


def test_wrong_answers_have_no_speed() -> None:
    entry = {"B": 4, "method": "1.0", "data": "gsm8k", "tokens_per_second": 812.4, "tokens_a_step": 5.8}
    entries = [{**entry, "answers": 4, "right": 4, "paper": 900.0}, {**entry, "B": 8, "answers": 8, "right": 5}]
    text = show(speed=done(note="synthetic", entries=entries))
    assert "| 1.0, gsm8k (synthetic) | 812 (5.80; paper 900) | 3 WRONG |" in text


def test_the_first_fault_of_a_kernel_is_shown() -> None:
    check = {"op": "select", "path": "triton", "case": "B=1", "passed": True, "fault": None}
    bad = {**check, "case": "B=2", "passed": False, "fault": "wrong token"}
    late = {"op": "select", "path": "triton", "case": "B=3", "skipped": "no time"}
    text = show(kernels=done(checks=[check, bad, late], passed=False))
    assert "| select | triton | 1/3   | B=2: wrong token |" in text
