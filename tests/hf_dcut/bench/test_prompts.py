"""Prompt sets, shipped and from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_dcut.bench.prompts import load_prompts, shipped


def test_the_shipped_set_is_there_and_wraps_around() -> None:
    assert shipped() == ["gsm8k"]
    prompts = load_prompts("gsm8k", 200)
    assert prompts[0].startswith("Janet")
    assert len(prompts) == 200
    assert prompts[192] == prompts[0]


def test_prompts_or_first_turns(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"turns": ["two", "three"]}\n')
    assert load_prompts(str(file), 3) == ["one", "two", "one"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompts"),
        ('{"prompt": "a"}\n{', "line 2 is not JSON"),
        ('{"text": "a"}', "line 1 has no text under 'prompt' or 'turns'"),
        ('["a"]', "line 1 has no text"),
    ],
)
def test_bad_files_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_prompts(str(file), 1)


def test_an_unknown_set_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="give a JSON-lines file or one of gsm8k"):
        load_prompts("no-such-set", 1)
