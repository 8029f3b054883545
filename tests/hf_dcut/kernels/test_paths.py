"""Which path is taken: references on a CPU, on a GPU what is there and agrees; an explicit choice never falls back."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from hf_dcut import kernels
from hf_dcut.kernels import paths, trials

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ATTENTION = (torch.bfloat16, 128, 128)


class Selector(str):
    """Stands for the selector's module, and for the name of its path."""

    @staticmethod
    def fits(rows: int, depth: int) -> bool:
        return rows <= 256


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[tuple[str, str], str | Exception | None]]:
    """As on a machine with a GPU, where each op and path has the fault that the test writes into the dictionary."""
    faults: dict[tuple[str, str], str | Exception | None] = {}

    def trial(op: str) -> object:
        def run(path: str, *problem: object) -> str | None:
            fault = faults.get((op, path))
            if isinstance(fault, Exception):
                raise fault
            return fault

        return run

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(trials, "TRIALS", {op: trial(op) for op in trials.TRIALS})
    monkeypatch.setattr(paths, "load", lambda op, path: Selector(path) if op == "select" else path)
    paths._works.cache_clear()
    yield faults
    paths._works.cache_clear()


def test_a_cpu_runs_the_references(caplog: pytest.LogCaptureFixture) -> None:
    assert kernels.select_path(CPU, 4, 15) == "reference"
    assert paths.argmax_path(CPU) == "reference"
    assert kernels.attention_path(CPU, *ATTENTION) == "reference"
    assert caplog.text == "", "there is nothing to say about it"


def test_a_gpu_runs_what_agrees(a_gpu: dict[tuple[str, str], str | Exception | None]) -> None:
    assert kernels.attention_path(GPU, *ATTENTION) == "varlen"
    assert kernels.attention_path(GPU, *ATTENTION, extras=True) == "triton"
    assert paths.argmax_path(GPU) == "triton"


@pytest.mark.parametrize(
    "fault", ["off by 1e-1", RuntimeError("no kernel image"), ImportError("no module"), TypeError("seqused_k")]
)
def test_what_fails_is_passed_over_and_told_once(
    fault: str | Exception, a_gpu: dict[tuple[str, str], str | Exception | None], caplog: pytest.LogCaptureFixture
) -> None:
    a_gpu["packed_attention", "varlen"] = fault
    with caplog.at_level(logging.WARNING, logger="hf_dcut"):
        assert [kernels.attention_path(GPU, *ATTENTION) for _ in range(3)] == ["triton"] * 3
        a_gpu["packed_attention", "triton"] = fault
        assert kernels.attention_path(GPU, torch.float16, 64, 64) == "reference"
    (first, *others) = caplog.messages
    assert first.startswith("varlen packed_attention torch.bfloat16 128 128 is not used on a GPU (")
    assert str(fault) in first
    assert len(others) == 2


def test_triton_s_own_errors_are_passed_over(a_gpu: dict[tuple[str, str], str | Exception | None]) -> None:
    errors = pytest.importorskip("triton.errors")
    a_gpu["argmax_logprob", "triton"] = errors.TritonError("out of shared memory")
    assert paths.argmax_path(GPU) == "reference"


def test_a_fault_of_another_kind_is_not_hidden(a_gpu: dict[tuple[str, str], str | Exception | None]) -> None:
    a_gpu["argmax_logprob", "triton"] = KeyError("ours")
    with pytest.raises(KeyError, match="ours"):
        paths.argmax_path(GPU)


def test_the_selector_of_larger_batches_is_the_reference(a_gpu: dict[tuple[str, str], str | Exception | None]) -> None:
    assert [kernels.select_path(GPU, rows, 15) for rows in (256, 257)] == ["triton", "reference"]


@pytest.mark.parametrize("op", ["argmax_logprob", "select", "packed_attention"])
def test_a_path_that_does_not_exist(op: str) -> None:
    with pytest.raises(ValueError, match=f"path='fused' for {op}: give 'triton', 'reference'"):
        paths.load(op, "fused")


def test_an_explicit_choice_does_not_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [n for n in sys.modules if n.startswith("hf_dcut.kernels.fused")]:
        monkeypatch.delitem(sys.modules, name)
    import hf_dcut.kernels.fused

    for name in ("argmax_logprob", "packed_attention", "select"):
        monkeypatch.delattr(hf_dcut.kernels.fused, name, raising=False)
    with pytest.raises(ImportError, match=r"path='triton' needs Triton.*hf-dcut\[triton\]"):
        kernels.argmax_logprob(torch.zeros(1, 3), path="triton")
    assert kernels.argmax_logprob(torch.zeros(1, 3))[0].item() == 0


def test_the_package_imports_and_runs_without_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import torch
import hf_dcut.engine, hf_dcut.drafters.dflash
from hf_dcut import kernels
assert kernels.argmax_logprob(torch.tensor([[0.0, 1.0]]))[0].tolist() == [1]
assert not [name for name in sys.modules if name.startswith("hf_dcut.kernels.fused")]
"""
    subprocess.run([sys.executable, "-P", "-c", program], check=True)
