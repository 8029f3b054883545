"""What a drafter learns from: answers that its target wrote, and the anchors drafts are made from in them.

A file of answers has a JSON object a line: `ids`, the prompt's tokens and then the answer's, and `prompt_tokens`, how
many of them are the prompt's. Other keys are ignored.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Text counts as looping from where this many tokens come for the third time.
LOOP_NGRAM, LOOP_TIMES = 8, 3


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and what the target said to it.

    Attributes:
        ids: tokens of the prompt, then of the answer.
        prompt_tokens: how many of them are the prompt's, at least one.
    """

    ids: tuple[int, ...]
    prompt_tokens: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def anchors(self) -> range:
        """Positions a block can start at: tokens of the answer that another one follows."""
        return range(self.prompt_tokens, len(self.ids) - 1)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some anchors of one answer: what one row of a training batch holds.

    Attributes:
        index: which answer.
        anchors: positions in it, ascending.
    """

    index: int
    anchors: tuple[int, ...]


def read_answers(path: str | os.PathLike[str]) -> list[Answer]:
    """Returns the answers of a JSON-lines file, which may be packed by gzip (`.gz`).

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line that is not an answer, with its number, or a file without any.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"answers={os.fspath(path)!r}: there is no such file")
    unpack = gzip.open if Path(path).suffix == ".gz" else open
    with unpack(path, "rt", encoding="utf-8") as lines:
        answers = [_answer(line, f"{os.fspath(path)}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not answers:
        raise ValueError(f"{os.fspath(path)} has no answers")
    return answers


def write_answer(answer: Answer) -> str:
    """Returns the line of a file of answers."""
    return json.dumps({"prompt_tokens": answer.prompt_tokens, "ids": list(answer.ids)}) + "\n"


def without_loop(answer: Answer) -> Answer:
    """Returns the answer up to where eight tokens in a row come for the third time.

    Small models fall into loops, which any drafter predicts: they teach little and flatter whoever is measured on them.
    """
    said, seen = answer.ids[answer.prompt_tokens :], Counter[tuple[int, ...]]()
    for start in range(len(said) - LOOP_NGRAM + 1):
        ngram = said[start : start + LOOP_NGRAM]
        seen[ngram] += 1
        if seen[ngram] == LOOP_TIMES:
            return Answer(answer.ids[: answer.prompt_tokens + start], answer.prompt_tokens)
    return answer


def pieces(answers: Sequence[Answer], anchors: int, seed: int, epoch: int) -> list[Piece]:
    """Returns an epoch in random order: every anchor of every answer once, at most `anchors` of them a piece.

    The same arguments give the same epoch, so a run that goes on after a kill needs no state of a random generator.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    found: list[Piece] = []
    for index, answer in enumerate(answers):
        places = torch.tensor(answer.anchors, dtype=torch.int64)
        places = places[torch.randperm(len(places), generator=generator)]
        parts = -(-len(places) // anchors)
        found += [Piece(index, tuple(sorted(part.tolist()))) for part in places.tensor_split(parts)] if parts else []
    order = torch.randperm(len(found), generator=generator).tolist()
    return [found[i] for i in order]


def frequent_tokens(answers: Sequence[Answer], size: int, vocabulary: int) -> list[int]:
    """Returns the `size` tokens that answers hold most often, ascending; unseen tokens fill up from the lowest id."""
    if not 0 < size <= vocabulary:
        raise ValueError(f"draft_vocab_size={size}: give 1 to the target's {vocabulary} tokens, or None for all")
    counts = torch.bincount(
        torch.tensor([t for a in answers for t in a.ids[a.prompt_tokens :]], dtype=torch.int64), minlength=vocabulary
    )
    return sorted(counts.argsort(descending=True, stable=True)[:size].tolist())


def _answer(line: str, where: str) -> Answer:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    ids = entry.get("ids") if isinstance(entry, dict) else None
    prompt = entry.get("prompt_tokens") if isinstance(entry, dict) else None
    if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise ValueError(f"{where} has no list of token ids under 'ids'")
    if not isinstance(prompt, int) or not 0 < prompt <= len(ids):
        raise ValueError(f"{where} has prompt_tokens={prompt!r}: give 1 to its {len(ids)} tokens")
    return Answer(tuple(ids), prompt)
