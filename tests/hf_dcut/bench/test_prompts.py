"""Prompt sets: shipped, from files, from the Hub."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hf_dcut.bench.prompts import encode_each, read_prompts, shipped

SETS = {"gsm8k": 192, "humaneval": 123, "math500": 192, "mbpp": 192, "mt-bench": 60}


def test_the_shipped_sets_are_there() -> None:
    assert shipped() == sorted(SETS)
    for name, count in SETS.items():
        prompts = read_prompts(name)
        assert len(prompts) == count
        assert all(prompts)
        assert len(set(prompts)) > 0.98 * count
    assert read_prompts("gsm8k")[0].startswith("Janet")
    assert read_prompts("mt-bench")[0].startswith("Compose an engaging travel blog post")


def test_prompts_or_first_turns(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    # A line separator within a text does not end the line of the file.
    file.write_text('{"prompt": "one\u2028more"}\n\n{"turns": ["two", "three"]}\n')
    assert read_prompts(str(file)) == ["one\u2028more", "two"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompts"),
        ('{"prompt": "a"}\n{', "line 2 is not JSON"),
        ('{"text": "a"}', "line 1 has no text under 'prompt' or 'turns'"),
        ('\n["a"]', "line 2 has no text"),
        ('{"turns": null}', "line 1 has no text"),
    ],
)
def test_bad_files_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompts(str(file))


def test_an_unknown_set_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="one of gsm8k, humaneval, math500, mbpp, mt-bench, or a dataset of the Hub"):
        read_prompts("no-such-set")


@pytest.mark.extras
def test_a_dataset_in_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    rows = [{"question": f"question {i}", "turns": [f"turn {i}", "more"]} for i in range(3)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_prompts(f"hub:{tmp_path}::test:question") == ["question 0", "question 1", "question 2"]
    assert read_prompts(f"hub:{tmp_path}::test:turns")[1] == "turn 1"
    with pytest.raises(ValueError, match="the dataset has the columns question, turns"):
        read_prompts(f"hub:{tmp_path}::test:prompt")


@pytest.mark.parametrize("source", ["hub:", "hub:openai/gsm8k", "hub:a:b:c:d:e", "hub:a:b::d"])
def test_a_hub_dataset_needs_its_parts(source: str) -> None:
    with pytest.raises(ValueError, match="give hub:ID:CONFIG:SPLIT:COLUMN"):
        read_prompts(source)


def test_without_the_library_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"needs the datasets library: pip install 'hf-dcut\[bench\]'"):
        read_prompts("hub:a:b:c:d")


def test_prompts_go_through_the_chat_template(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert encode_each(tokenizer, ["w5 w6", "w7"]) == [(5, 6), (7,)]
    tokenizer.chat_template = (
        "{% for m in messages %}w9 {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %} w8{% endif %}{% if enable_thinking %} w99{% endif %}"
    )
    assert encode_each(tokenizer, ["w5 w6", "w7"]) == [(9, 5, 6, 8), (9, 7, 8)]
