"""Prompt sets: shipped, JSON-lines files or Hub datasets, put through the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

_SHIPPED = files("hf_dcut.bench") / "data"
_HUB = "hub:"


def shipped() -> list[str]:
    """Returns the names of the prompt sets that come with the package."""
    return sorted(entry.name.removesuffix(".jsonl") for entry in _SHIPPED.iterdir() if entry.name.endswith(".jsonl"))


def read_prompts(source: str) -> list[str]:
    """Returns all prompts of a set.

    Args:
        source: name of a shipped set; a JSON-lines file with "prompt" in each line, or "turns", whose first is taken;
            or a dataset of the Hub as "hub:ID:CONFIG:SPLIT:COLUMN", such as "hub:openai/gsm8k:main:test:question".

    Raises:
        ValueError: unknown set, an empty one, or a line without a prompt, with its number.
        ImportError: a Hub dataset without the `datasets` library.
    """
    if source.startswith(_HUB):
        prompts = list(_hub(source))
    else:
        entry = _SHIPPED / f"{source}.jsonl" if source in shipped() else Path(source)
        if not entry.is_file():
            raise ValueError(
                f"data={source!r}: give a JSON-lines file, one of {', '.join(shipped())}, or a dataset of the Hub as "
                "hub:ID:CONFIG:SPLIT:COLUMN"
            )
        # Not `splitlines`, for which some characters that JSON leaves as they are end a line too.
        lines = entry.read_text(encoding="utf-8").split("\n")
        prompts = [_prompt(line, number, source) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f"data={source!r} has no prompts")
    return prompts


def _prompt(line: str, number: int, source: str) -> str:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"data={source!r}, line {number} is not JSON: {error}") from error
    return _text(entry, number, source)


def _text(entry: Any, number: int, source: str) -> str:
    """Returns the prompt of a line or row: "prompt", or the first of "turns"."""
    prompt = entry.get("prompt") or next(iter(entry.get("turns") or ()), None) if isinstance(entry, dict) else None
    if not isinstance(prompt, str):
        raise ValueError(f"data={source!r}, line {number} has no text under 'prompt' or 'turns'")
    return prompt


def _hub(source: str) -> Iterable[str]:
    """Yields a column of a Hub dataset; "turns" gives the first of each."""
    parts = source.removeprefix(_HUB).split(":")
    if len(parts) != 4 or not parts[0] or not parts[2] or not parts[3]:
        raise ValueError(f"data={source!r}: give hub:ID:CONFIG:SPLIT:COLUMN; CONFIG may be empty")
    name, config, split, column = parts
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(f"data={source!r} needs the datasets library: pip install 'hf-dcut[bench]'") from error
    rows = load_dataset(name, config or None, split=split)
    if column not in rows.column_names:
        raise ValueError(f"data={source!r}: the dataset has the columns {', '.join(rows.column_names)}")
    for number, value in enumerate(rows[column], 1):
        yield _text({"turns": value} if isinstance(value, list) else {"prompt": value}, number, source)


def encode_each(tokenizer: PreTrainedTokenizerBase, prompts: Iterable[str]) -> list[tuple[int, ...]]:
    """Returns token ids of each prompt in the chat template, thinking off; as plain text without a template."""
    prompts, chat = list(prompts), tokenizer.chat_template is not None
    if chat:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        prompts = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, enable_thinking=False, tokenize=False
        )
    return [tuple(ids) for ids in tokenizer(prompts, add_special_tokens=not chat)["input_ids"]]
