"""The file of a run: JSON lines, appended as it goes, so that a killed run goes on where it stopped.

{"kind": "run", ..}      the plan, the machine, versions, commit, prompts left out: the first line
{"kind": "costs", ..}    a cell's measured step seconds; "tree": whether drafts are trees
{"kind": "traces", ..}   the recorded requests of a data set; "tree" as well
{"kind": "round", ..}    one round of a cell
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_dcut.bench.cell import Cell, Key
from hf_dcut.bench.surface import Surface
from hf_dcut.bench.trace import Trace

FORMAT = 1


class Journal:
    """What a run has said so far.

    Args:
        path: its file; None keeps it in memory.
        lines: what the file holds.
    """

    def __init__(self, path: Path | None, lines: list[dict[str, Any]]):
        self.path, self.lines = path, lines

    @classmethod
    def read(cls, path: Path) -> Journal:
        """Returns a run's journal. A last line that was cut off by a kill is left out.

        Raises:
            ValueError: a file of something else, or a damaged line, with its number.
        """
        texts = path.read_bytes().decode("utf-8", errors="replace").split("\n")
        # A whole file ends with a newline, so what stands behind the last one was never finished.
        lines = [_parse(text, number, path) for number, text in enumerate(texts[:-1], 1)]
        if not lines or lines[0].get("kind") != "run" or lines[0].get("format") != FORMAT:
            raise ValueError(f"{path} is not a run of this version's hf-dcut bench: name another file")
        return cls(path, lines)

    @classmethod
    def open(cls, path: Path | None, header: dict[str, Any]) -> Journal:
        """Returns the journal of a run that begins, or goes on in a file that exists.

        Args:
            path: its file; None keeps it in memory.
            header: plan and machine, which must be those of the file.

        Raises:
            ValueError: a file of another run, with what differs.
        """
        header = json.loads(json.dumps({"kind": "run", "format": FORMAT, **header}))
        if path is None or not path.exists() or not path.stat().st_size:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            journal = cls(path, [])
            journal.write(header)
            return journal
        journal = cls.read(path)
        for part in ("plan", "machine"):
            old, new = journal.header[part], header[part]
            other = [f"{k}={old.get(k)!r}, not {v!r}" for k, v in new.items() if old.get(k) != v]
            if other:
                raise ValueError(f"{path} holds a run with {'; '.join(other)}: name another file, or remove it")
        journal._cut_off_rest()
        return journal

    @property
    def header(self) -> dict[str, Any]:
        """The first line."""
        return self.lines[0]

    def write(self, line: dict[str, Any]) -> None:
        """Adds a line, on the disk when it returns."""
        self.lines.append(line)
        if self.path is None:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def cell(self, key: Key) -> Cell:
        """Returns a cell with the rounds so far."""
        return Cell(key, [line for line in self._of("round") if line["cell"] == key.to_dict()])

    def cells(self) -> list[Cell]:
        """Returns all cells that have rounds, in order."""
        keys = dict.fromkeys(Key(**line["cell"]) for line in self._of("round"))
        return [self.cell(key) for key in keys]

    def surface(self, draft_tokens: int, tree: bool = False) -> Surface | None:
        """Returns the measured step seconds of this D, of all cells together; None without any."""
        rows: dict[int, dict[int, list[float]]] = {}
        width = draft_tokens
        for line in self._of("costs", tree):
            if line["draft_tokens"] == draft_tokens:
                width = line.get("nodes", draft_tokens)
                for b, row in line["seconds"].items():
                    for t, seconds in row.items():
                        rows.setdefault(int(b), {}).setdefault(int(t), []).append(seconds)
        if not rows:
            return None
        return Surface({b: {t: sum(s) / len(s) for t, s in row.items()} for b, row in rows.items()}, width)

    def traces(self, data: str, tree: bool = False) -> list[Trace]:
        """Returns the recorded requests of a data set, greedy ones, in order."""
        lines = [line for line in self._of("traces", tree) if line["data"] == data]
        return [Trace.from_dict(values) for line in lines for values in line["requests"]]

    def recorded(self, tree: bool = False) -> list[str]:
        """Returns the data sets that have traces, in order."""
        return [line["data"] for line in self._of("traces", tree)]

    def has_costs(self, key: Key, tree: bool = False) -> bool:
        """Returns whether a cell's step seconds are there."""
        return any(line["cell"] == key.to_dict() for line in self._of("costs", tree))

    def _of(self, kind: str, tree: bool = False) -> Iterator[dict[str, Any]]:
        return (line for line in self.lines if line["kind"] == kind and line.get("tree", False) == tree)

    def _cut_off_rest(self) -> None:
        """Shortens the file to its whole lines."""
        assert self.path is not None
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with self.path.open("r+b") as file:
                file.truncate(whole)


def _parse(text: str, number: int, path: Path) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {number} is damaged ({error}): remove the line, and its round runs again"
        ) from error
    if not isinstance(line, dict) or "kind" not in line:
        raise ValueError(f"{path}, line {number} is not of a run of hf-dcut bench")
    return line
