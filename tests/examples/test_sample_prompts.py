"""Prompts that the target makes up: what a user would say to it, each once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def example(load_example: Callable[[str], ModuleType]) -> ModuleType:
    return load_example("sample_prompts")


def test_the_user_speaks_between_the_templates_tokens(example: ModuleType, smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    begin, end = example.user_turn(tokenizer)
    whole = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], return_dict=True)["input_ids"]
    words = tokenizer("Hello", add_special_tokens=False)["input_ids"]
    assert whole[: len(begin) + len(words) + 1] == [*begin, *words, end]
    assert tokenizer.decode([end]) == "<|im_end|>"


@pytest.mark.parametrize(
    "template", ["{{ messages[0]['content'] }}", "{{ messages[0]['content'] }} then the answer", "nothing said"]
)
def test_templates_without_an_end_of_their_own_are_refused(example: ModuleType, smollm2: Path, template: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="give prompts of your own"):
        example.user_turn(tokenizer)


def test_prompts_are_written_as_training_reads_them(
    example: ModuleType, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "prompts.jsonl"
    monkeypatch.setattr(sys, "argv", ["", "--target", str(smollm2), "--count", "12", "--out", str(out)])
    example.main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    texts = [line["prompt"] for line in lines]
    assert [line["id"] for line in lines] == [f"sampled/{number}" for number in range(len(lines))]
    assert 3 <= len(texts) == len(set(texts)) <= 12
    assert all(len(text) >= 15 and "<|im_end|>" not in text for text in texts)
