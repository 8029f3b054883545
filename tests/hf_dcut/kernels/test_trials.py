"""The trials pass for kernels that are right, and find each way of being wrong."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_dcut.kernels import Selected, trials
from hf_dcut.kernels.paths import load

CPU = torch.device("cpu")
PROBLEMS: dict[str, tuple[Any, ...]] = {
    "select": (),
    "argmax_logprob": (),
    "packed_attention": (torch.float32, 64, 48),
}


def twin(op: str, change: Callable[..., Any]) -> SimpleNamespace:
    """Returns a module whose op is the reference's with something changed in what it returns."""
    right = getattr(load(op, "reference"), op)
    return SimpleNamespace(**{op: lambda *given: change(right(*given), *given)})


@pytest.mark.parametrize("op", PROBLEMS)
@pytest.mark.parametrize("path", ["reference", "triton"])
def test_right_ones_pass(op: str, path: str) -> None:
    if path == "triton":
        pytest.importorskip("triton")
    assert trials.TRIALS[op](load(op, path), CPU, *PROBLEMS[op]) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_pass(dtype: torch.dtype) -> None:
    assert trials.try_attention(load("packed_attention", "reference"), CPU, dtype, 128, 128) is None


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_soft_caps_and_sinks_pass(path: str) -> None:
    if path == "triton":
        pytest.importorskip("triton")
    assert trials.try_attention(load("packed_attention", path), CPU, torch.float32, 64, 48, True) is None


@pytest.mark.parametrize("place", [10, 11])
def test_soft_caps_and_sinks_that_are_left_out(place: int) -> None:
    def without(out: torch.Tensor, *given: Any) -> torch.Tensor:
        return _reference(*given[:place], None, *given[place + 1 :])

    fault = trials.try_attention(twin("packed_attention", without), CPU, torch.float32, 32, 32, True)
    assert fault is not None
    assert fault.startswith("off by")


@pytest.mark.parametrize("field", Selected._fields)
def test_a_selector_with_one_wrong_field(field: str) -> None:
    def spoil(selected: Selected, *given: object) -> Selected:
        value = getattr(selected, field)
        return selected._replace(**{field: ~value if value.dtype == torch.bool else value + 1})

    assert trials.try_select(twin("select", spoil), CPU) == f"wrong {field}"


def test_an_argmax_that_takes_the_last_of_equals() -> None:
    def last(result: object, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = logits.shape[-1] - 1 - logits.flip(-1).argmax(-1)
        return index, logits.log_softmax(-1).amax(-1)

    fault = trials.try_argmax_logprob(twin("argmax_logprob", last), CPU)
    assert fault is not None
    assert fault.startswith("index ")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda out, *given: out * 1.01, "off by"),
        (lambda out, *given: torch.full_like(out, torch.nan), "off by nan"),
        # A window that is one too wide, as where its width is taken to leave out the query's own cell.
        (lambda out, *given: _reference(*given[:-1], given[-1] and given[-1] + 1), "window=30"),
        # Unused cells of a slot are looked at.
        (lambda out, *given: _reference(*given[:5], given[5] + 1, *given[6:]), "off by"),
    ],
)
def test_wrong_attention(wrong: Callable[..., Any], told: str) -> None:
    fault = trials.try_attention(twin("packed_attention", wrong), CPU, torch.float32, 32, 32)
    assert fault is not None
    assert told in fault


def _reference(*given: Any) -> torch.Tensor:
    return load("packed_attention", "reference").packed_attention(*given)
