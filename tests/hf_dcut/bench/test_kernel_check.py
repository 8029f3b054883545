"""The kernels' check: it finds a kernel that is wrong or does not run, and goes on with the others."""

from __future__ import annotations

import time
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hf_dcut.bench import kernel_check
from hf_dcut.bench.kernel_check import check_kernels, host_seconds, time_kernels
from hf_dcut.kernels import paths

CPU = torch.device("cpu")


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused argmax is off by one, the fused selector does not run, and attention is its reference."""
    load = paths.load

    def spoil(op: str, path: str) -> ModuleType | SimpleNamespace:
        right = load(op, "reference")
        if path == "reference" or op == "packed_attention":
            return right
        if op == "argmax_logprob":
            return SimpleNamespace(
                argmax_logprob=lambda x: (right.argmax_logprob(x)[0] + 1, right.argmax_logprob(x)[1])
            )

        def fail(*given: torch.Tensor) -> None:
            raise RuntimeError("no kernel image is available")

        return SimpleNamespace(select=fail)

    monkeypatch.setattr(paths, "load", spoil)
    monkeypatch.setattr(kernel_check, "runnable", lambda device, op: ["triton"])


def test_each_fault_is_told(spoiled: None) -> None:
    found = {(entry["op"], entry["passed"], entry["fault"]) for entry in check_kernels(CPU, tiny=True)}
    assert found == {
        ("select", False, "RuntimeError: no kernel image is available"),
        ("argmax_logprob", False, "wrong index"),
        ("packed_attention", True, None),
    }


def test_what_does_not_run_has_no_time(spoiled: None) -> None:
    found = {(entry["op"], entry["path"]): entry for entry in time_kernels(CPU, tiny=True)}
    assert found["select", "triton"]["fault"] == "RuntimeError: no kernel image is available"
    assert "p50" not in found["select", "triton"]
    assert found["select", "reference"]["p50"] > 0


def test_seconds_leave_the_warm_up_out() -> None:
    waits = iter([0.2, 0.2, 0.2, *[0.0] * 5])
    found = host_seconds(lambda: time.sleep(next(waits)), CPU, repeats=5)
    assert 0 <= found["p50"] <= found["p95"] < 0.1


def test_checks_that_cannot_agree_fail() -> None:
    layer = kernel_check.Layer(2, 3, 20, (4, 2), 16, torch.float32, CPU)
    right = layer.attend("reference", wide=True)
    assert kernel_check._far(right, right, 1e-6) is None
    assert kernel_check._far(right + 1e-3, right, 1e-6) == "off by 1.0e-03, allowed 1e-06"
    assert kernel_check._far(right * torch.nan, right, 1e-6) == "off by nan, allowed 1e-06"


def test_what_there_is_no_time_for_is_told() -> None:
    answers = iter([None, *["no time"] * 100])
    for found in (check_kernels(CPU, True, lambda: "no time"), time_kernels(CPU, True, late=lambda: next(answers))):
        assert all(entry.keys() == {"op", "path", "case", "skipped"} for entry in found[1:])
    assert "p50" in found[0]
