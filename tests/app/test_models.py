from __future__ import annotations

from collections.abc import Callable

import pytest

from hf_dcut.app.models import Models


def test_loading_tells_its_stage(models_of: Callable[..., Models]) -> None:
    made = models_of()
    assert not made.ready
    assert not made.wait(0.0)
    made.start()
    assert made.wait(60)
    assert made.ready
    assert made.stage == "ready"
    assert made.name == "tiny-llama"


def test_a_missing_model_is_told(models_of: Callable[..., Models]) -> None:
    made = models_of()
    made.target = "models/nowhere"
    made.start()
    with pytest.raises(ValueError, match=r"(?s)loading the model failed: .*models/nowhere"):
        made.wait(60)
    assert made.error
    assert not made.ready


def test_costs_grow_with_the_batch_and_are_copies(models_of: Callable[..., Models]) -> None:
    made = models_of(first_batch=2)
    made.start()
    made.wait(60)
    (row,) = made.costs("lookup", 2).seconds.values()
    assert set(row) == {1, 2}
    (row,) = made.costs("lookup", 3).seconds.values()
    assert set(row) == {1, 2, 4}
    table = made.costs("lookup", 3)
    table.observe(1, 0, 1e9)
    assert made.costs("lookup", 3).seconds != table.seconds


def test_titles_name_every_drafter(models: Models) -> None:
    assert [name for _, name in models.titles()] == ["lookup", "random"]
    several = Models("target", ("owner/block", "owner/block+lookup", "lookup", "random+lookup"))
    assert [words for words, _ in several.titles()] == [
        "DFlash (block)",
        "DFlash (block) and prompt lookup",
        "Prompt lookup (copies from the text)",
        "Untrained DFlash (always wrong) and prompt lookup",
    ]
