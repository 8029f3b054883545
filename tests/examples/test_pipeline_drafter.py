"""`pipeline` with a drafter: its texts are those of the plain pipeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import pipeline

import hf_dcut

PROMPTS = ["abc", "a longer prompt, abc", "x"]


@pytest.fixture(scope="module")
def pipe(tiny_folder: Path) -> Any:
    return pipeline("text-generation", str(tiny_folder))


def test_texts_are_those_of_the_plain_pipeline(load_example: Callable[[str], ModuleType], pipe: Any) -> None:
    example = load_example("pipeline_drafter")
    options = {"do_sample": False, "max_new_tokens": 20}
    calls: list[Any] = []
    original = hf_dcut.PromptLookupDrafter.bind

    class Drafter(hf_dcut.PromptLookupDrafter):
        def bind(self, *arguments: Any) -> Any:
            calls.append(arguments)
            return original(self, *arguments)

    texts = example.answer(pipe, PROMPTS, Drafter(), dcut=0.5, **options)
    plain = [pipe(prompt, return_full_text=False, **options)[0]["generated_text"] for prompt in PROMPTS]
    assert texts == plain
    assert len(set(texts)) == 3
    assert len(calls) == 1


def test_a_misspelt_option_is_not_dropped(load_example: Callable[[str], ModuleType], pipe: Any) -> None:
    with pytest.raises(ValueError, match="max_new_token"):
        load_example("pipeline_drafter").answer(pipe, PROMPTS, hf_dcut.PromptLookupDrafter(), max_new_token=3)
