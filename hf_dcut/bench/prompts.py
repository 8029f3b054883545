"""Prompt sets: JSON-lines files, put through the model's chat template."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

_SHIPPED = files("hf_dcut.bench") / "data"


def shipped() -> list[str]:
    """Returns the names of the prompt sets that come with the package."""
    return sorted(entry.name.removesuffix(".jsonl") for entry in _SHIPPED.iterdir() if entry.name.endswith(".jsonl"))


def load_prompts(source: str, count: int) -> list[str]:
    """Returns the first `count` prompts of a set, from the start again if it has fewer; raises as `read_prompts`."""
    prompts = read_prompts(source)
    return [prompts[i % len(prompts)] for i in range(count)]


def read_prompts(source: str) -> list[str]:
    """Returns all prompts of a set.

    Args:
        source: name of a shipped set, or a JSON-lines file: "prompt" in each line, or "turns", whose first is taken.

    Raises:
        ValueError: unknown set, an empty file, or a line without a prompt, with its number.
    """
    entry = _SHIPPED / f"{source}.jsonl" if source in shipped() else Path(source)
    if not entry.is_file():
        raise ValueError(f"data={source!r}: give a JSON-lines file or one of {', '.join(shipped())}")
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
    prompt = entry.get("prompt") or next(iter(entry.get("turns", ())), None) if isinstance(entry, dict) else None
    if not isinstance(prompt, str):
        raise ValueError(f"data={source!r}, line {number} has no text under 'prompt' or 'turns'")
    return prompt


def encode(tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> dict[str, Tensor]:
    """Returns input_ids and attention_mask, int64 [B, P], left-padded: prompts in the chat template, thinking off."""
    texts, special = _texts(tokenizer, prompts)
    encoded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=special)
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def encode_each(tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> list[tuple[int, ...]]:
    """Returns the token ids of each prompt as `encode` makes them, without padding."""
    texts, special = _texts(tokenizer, prompts)
    return [tuple(ids) for ids in tokenizer(texts, add_special_tokens=special)["input_ids"]]


def _texts(tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> tuple[list[str], bool]:
    """Returns what is encoded, and whether special tokens are to be added: a chat template has them."""
    if tokenizer.chat_template is None:
        return prompts, True
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, enable_thinking=False, tokenize=False)
    return texts, False
