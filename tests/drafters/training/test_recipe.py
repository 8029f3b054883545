"""The numbers of training: what they are allowed to be, and the course of the learning rate."""

from __future__ import annotations

from typing import Any

import pytest

from hf_dcut.drafters.training import Recipe


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "steps=0: give a positive integer"),
        ({"batch": 2.0}, "batch=2.0"),
        ({"anchors": True}, "anchors=True"),
        ({"learning_rate": 0.0}, "learning_rate=0.0: give a positive number"),
        ({"decay": -1.0}, "decay=-1.0: give a positive number or None"),
        ({"warmup": 1.5}, r"warmup=1.5: give a number in \[0, 1\]"),
        ({"precision": "fp8"}, "precision='fp8': give 'bf16' or 'no'"),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**values)


def test_the_rate_rises_and_falls() -> None:
    recipe = Recipe(steps=100, warmup=0.1, floor=0.1, learning_rate=1.0)
    rates = [recipe.rate(step) for step in range(100)]
    top = rates.index(max(rates))
    assert top == 9
    assert rates[9] == 1.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[99] == pytest.approx(0.1)
    # Half-way down the cosine.
    assert rates[54] == pytest.approx(0.1 + 0.9 / 2)


def test_the_rate_runs_out_with_the_time() -> None:
    recipe = Recipe(steps=None, warmup=0.0, floor=0.0, learning_rate=1.0)
    assert recipe.rate(7, 0.5) == pytest.approx(0.5)
    assert recipe.rate(7, 1.0) == pytest.approx(0.0)
    both = Recipe(steps=10, warmup=0.0, floor=0.0, learning_rate=1.0)
    assert both.rate(4, 0.1) == both.rate(0, 0.5) == pytest.approx(0.5)
