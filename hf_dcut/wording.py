"""Numbers in sentences."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Returns a number with its noun, which gets an s unless there is one: "1 round", "0 rounds", "2,000 steps"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
