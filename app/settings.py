"""`Settings`: what a visitor chose, checked against the `Limits` of the page before a model sees any of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_dcut.config import check_budget


@dataclass(frozen=True)
class Limits:
    """What one visitor may ask for, so that the others get their turn.

    Attributes:
        fewest, most: requests of a batch.
        prompt_tokens: of the longest prompt.
        new_tokens: of each request.
        seconds: that a run may take; it stops with what it has.
        waiting: visitors in the queue; the next one is told to come back.
        open_runs: runs that are stepped through by hand at once; the longest unused makes room for a new one.
    """

    fewest: int = 2
    most: int = 32
    prompt_tokens: int = 768
    new_tokens: int = 256
    seconds: float = 180.0
    waiting: int = 40
    open_runs: int = 4


@dataclass(frozen=True)
class Settings:
    """One batch and how it is generated.

    Attributes:
        prompts: one a request.
        drafter: name of the drafter, as `Models` lists it.
        budget: "auto" or a share in (0, 1].
        new_tokens: most tokens of each request.
        sample: whether tokens are drawn; else the likeliest is taken.
        temperature, top_k, top_p: of sampling; top_k = 0 and top_p = 1 change nothing.
        seed: of the first request; request i takes seed + i.
    """

    prompts: tuple[str, ...]
    drafter: str
    budget: float | str = "auto"
    new_tokens: int = 64
    sample: bool = False
    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def check(self, limits: Limits) -> None:
        """Raises ValueError for the first value the page does not allow, naming it and what is allowed."""
        count = len(self.prompts)
        if not limits.fewest <= count <= limits.most:
            raise ValueError(f"prompts: {count} given, {limits.fewest} to {limits.most} are allowed")
        if self.budget == "none":
            raise ValueError("budget 'none' drafts nothing: choose auto or a share of the positions")
        check_budget(self.budget)
        _check_number("new tokens", self.new_tokens, 1, limits.new_tokens)
        if self.sample:
            _check_number("temperature", self.temperature, 0.05, 5)
            _check_number("top-k", self.top_k, 0, 100_000)
            _check_number("top-p", self.top_p, 0.01, 1)
            _check_number("seed", self.seed, 0, 2**31)

    def processors(self) -> LogitsProcessorList:
        """Returns what `generate` would make of the sampling values, in its order."""
        made = LogitsProcessorList()
        if not self.sample:
            return made
        if self.temperature != 1:
            made.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            made.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            made.append(TopPLogitsWarper(float(self.top_p)))
        return made

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields, JSON-able."""
        return {**vars(self), "prompts": list(self.prompts)}


def split_prompts(text: str) -> tuple[str, ...]:
    """Returns the prompts of a text: its paragraphs if it has empty lines, else its lines."""
    parts = re.split(r"\n\s*\n", text.strip()) if re.search(r"\n\s*\n", text.strip()) else text.splitlines()
    return tuple(part.strip() for part in parts if part.strip())


def join_prompts(prompts: Sequence[str]) -> str:
    """Returns a text that `split_prompts` takes apart again; empty lines inside a prompt are left out."""
    parts = ["\n".join(line for line in prompt.split("\n") if line.strip()) for prompt in prompts]
    return ("\n\n" if any("\n" in part for part in parts) else "\n").join(parts)


def _check_number(name: str, value: float, least: float, most: float) -> None:
    # An emptied field arrives as None.
    if value is None or not least <= value <= most:
        raise ValueError(f"{name} {value}: give a number from {least:g} to {most:g}")
