"""`TapCache`: the target's tapped hidden states of all answers, on disk, so that training steps need no target forward.

    taps.bin       [tokens, F] in the cache's dtype: the rows of all answers, one answer behind the other
    index.jsonl    one line an answer that is whole: its digest, first row and number of rows
    meta.json      what the rows are of; another target or other taps are refused

Answers are found by their content, so a cache can be added to, and a killed run loses only the answers in work.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_dcut.drafters.checkpoint import parse_dtype
from hf_dcut.drafters.training.answers import Answer

# Token ids of one batch of answers -> their taps [tokens, F], one answer behind the other.
ReadTaps = Callable[[Sequence[Answer]], Tensor]


class TapCache:
    """Taps on disk, by answer.

    Args:
        folder: where; made if need be.
        width: F, numbers a token: taps x hidden size.
        dtype: they are kept in.
        source: what they are of, JSON-able: the target and the tapped layers.

    Raises:
        ValueError: the folder holds taps of something else.
    """

    def __init__(
        self, folder: str | os.PathLike[str], width: int, dtype: str | torch.dtype, source: dict[str, Any]
    ) -> None:
        self.folder, self.width, self.dtype = Path(folder), width, parse_dtype(dtype)
        self.row_bytes = width * self.dtype.itemsize
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check_meta({"width": width, "dtype": str(self.dtype), **source})
        entries = [json.loads(line) for line in self._whole_lines()]
        self.rows = {e["digest"]: (e["start"], e["tokens"]) for e in entries}

    @property
    def tokens(self) -> int:
        """Rows that are whole."""
        return sum(tokens for _, tokens in self.rows.values())

    def missing(self, answers: Sequence[Answer]) -> list[Answer]:
        """Returns the answers that are not in the cache, each once."""
        return list({digest(a): a for a in answers if digest(a) not in self.rows}.values())

    def fill(self, answers: Sequence[Answer], read: ReadTaps, batch_tokens: int = 4096) -> Iterator[int]:
        """Adds the taps of answers, yielding how many answers each batch added.

        Args:
            answers: those already there are skipped.
            read: gives the taps of a batch.
            batch_tokens: most tokens of a batch; a longer answer is a batch of its own.

        Raises:
            OSError: the disk has too little room, with the numbers, before anything is written.
        """
        missing = self.missing(answers)
        self._check_disk(sum(map(len, missing)))
        with open(self._taps, "ab") as taps, open(self._index, "a", encoding="utf-8") as index:
            # What a kill left in the middle goes: part of a line, and rows that no line names.
            index.truncate(sum(map(len, self._whole_lines())))
            taps.truncate(self.tokens * self.row_bytes)
            for batch in _batches(missing, batch_tokens):
                rows = read(batch).to(self.dtype).cpu().contiguous()
                assert rows.shape == (sum(map(len, batch)), self.width), rows.shape
                taps.write(rows.view(torch.uint8).numpy().tobytes())
                taps.flush()
                for answer in batch:
                    index.write(self._line(answer))
                index.flush()
                yield len(batch)

    def open(self) -> Callable[[Answer], Tensor]:
        """Returns a function that gives the taps [tokens, F] of an answer from the mapped file."""
        taps = torch.empty(0, self.width)
        if self.rows:
            size = self.tokens * self.width
            taps = torch.from_file(str(self._taps), shared=False, size=size, dtype=self.dtype).view(-1, self.width)

        def of(answer: Answer) -> Tensor:
            start, tokens = self.rows[digest(answer)]
            return taps[start : start + tokens]

        return of

    @property
    def _taps(self) -> Path:
        return self.folder / "taps.bin"

    @property
    def _index(self) -> Path:
        return self.folder / "index.jsonl"

    def _whole_lines(self) -> list[str]:
        text = self._index.read_text(encoding="utf-8") if self._index.exists() else ""
        return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def _line(self, answer: Answer) -> str:
        key, place = digest(answer), (self.tokens, len(answer))
        self.rows[key] = place
        return json.dumps({"digest": key, "start": place[0], "tokens": place[1]}) + "\n"

    def _check_meta(self, meta: dict[str, Any]) -> None:
        path, meta = self.folder / "meta.json", json.loads(json.dumps(meta))
        if not path.exists():
            path.write_text(json.dumps(meta, indent=1) + "\n")
        found = json.loads(path.read_text())
        if found != meta:
            differ = sorted(k for k in {*found, *meta} if found.get(k) != meta.get(k))
            raise ValueError(
                f"{self.folder} holds taps of something else: {', '.join(f'{k}={found.get(k)!r}' for k in differ)}, "
                f"wanted {', '.join(f'{k}={meta.get(k)!r}' for k in differ)}. Give another folder or remove this one"
            )

    def _check_disk(self, tokens: int) -> None:
        need, free = tokens * self.row_bytes, shutil.disk_usage(self.folder).free
        if need > free:
            raise OSError(
                f"taps of {tokens} tokens need {need / 1e9:.2f} GB in {self.folder}, which has {free / 1e9:.2f} GB "
                f"free ({self.row_bytes} bytes a token). Free some, name another folder, or train on fewer answers"
            )


def digest(answer: Answer) -> str:
    """Returns a key of the answer's tokens; where the prompt ends does not change their taps."""
    return hashlib.sha1(json.dumps(answer.ids).encode(), usedforsecurity=False).hexdigest()


def _batches(answers: Sequence[Answer], tokens: int) -> Iterator[list[Answer]]:
    """Yields runs of answers of up to so many tokens, at least one answer each."""
    batch: list[Answer] = []
    for answer in answers:
        if batch and sum(map(len, batch)) + len(answer) > tokens:
            yield batch
            batch = []
        batch.append(answer)
    if batch:
        yield batch
