"""Measured seconds of a step, C(B, T): what the budget is weighed against (the paper's section 3.3 and table 3).

A step is measured whole, drafting to commit, on the model that will run it: B in powers of two, T at the anchors alone
and at some shares of the positions, and the plain step, all in turns. Between measured points T is interpolated at
equal share of positions, and the nearest measured B stands for its neighbours. The table is kept as JSON with a
fingerprint of everything the seconds depend on, so the next process starts with it.

Steps that run correct the table. Only ratios of its entries decide anything, so a machine that is slower for a while,
which only the steps that happen to run would show, must not be taken for dearer steps of that kind: `CostTable.pace`.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HOME
from tqdm.auto import tqdm

from hf_dcut.timing import STEADY, is_steady, rising, steadiest

logger = logging.getLogger(__name__)

# How far one observed step may pull the pace and its entry, and how far off it may be before it is taken for a hiccup.
_PACE = 0.2
_WEIGHT = 0.05
_HICCUP = 2.0
_FORMAT = 4


class CostTable:
    """Seconds of plain and drafted steps.

    Args:
        draft_tokens: D.
        fingerprint: what the seconds depend on, JSON-able.
        path: the file it is kept in; None keeps it in memory.

    Attributes:
        seconds: {K/V length: {B: {T: seconds}}}, where T = 0 is the plain step.
        unsteady: {(K/V length, B): process} of rows that varied too much to be kept: any other process measures them
            again.
    """

    def __init__(self, draft_tokens: int, fingerprint: dict[str, Any] | None = None, path: Path | None = None):
        self.draft_tokens, self.fingerprint, self.path = draft_tokens, fingerprint or {}, path
        self.seconds: dict[int, dict[int, dict[int, float]]] = {}
        self.unsteady: dict[tuple[int, int], int] = {}
        self.pace = 1.0

    @classmethod
    def from_rows(cls, rows: dict[int, dict[int, float]], draft_tokens: int) -> CostTable:
        """Returns a table with given seconds, {B: {T: seconds}}; T = 0 is the plain step."""
        table = cls(draft_tokens)
        if rows:
            table.seconds[0] = {b: dict(row) for b, row in rows.items()}
        return table

    def drafted(self, requests: int, total: int, kv_length: int = 0) -> float:
        """Returns C(B, T): seconds of a step that drafts for B requests and verifies T packed tokens."""
        points, seconds = self.curve(requests, kv_length)
        right = min(max(1, bisect.bisect_left(points, total)), len(points) - 1)
        left = max(0, right - 1)
        low, high = points[left], points[right]
        share = 0.0 if low == high else min(1.0, max(0.0, (total - low) / (high - low)))
        return seconds[left] + share * (seconds[right] - seconds[left])

    def curve(self, requests: int, kv_length: int = 0) -> tuple[list[float], list[float]]:
        """Returns rising packed tokens of B requests and the seconds of a drafted step there; straight in between."""
        measured, row = self._row(requests, kv_length)
        points = sorted(t for t in row if t)
        if not points:
            raise ValueError("the cost table has no drafted steps: measure it with hf_dcut.warmup")
        return [t * requests / measured for t in points], [row[t] for t in points]

    def plain(self, requests: int, kv_length: int = 0) -> float:
        """Returns seconds of a step that drafts nothing."""
        _, row = self._row(requests, kv_length)
        if 0 not in row:
            raise ValueError("the cost table has no plain step: measure it with hf_dcut.warmup")
        return row[0]

    def observe(self, requests: int, total: int, seconds: float, kv_length: int = 0) -> None:
        """Lets a step that took `seconds` pull the entry it was predicted from; total = 0 is the plain step.

        A machine that is slower for a while is slower at every kind of step, and decisions go by ratios. So what a step
        is off is first of all taken for the pace of the machine, and only a part of it for its entry's own fault.
        """
        measured, row = self._row(requests, kv_length)
        predicted = self.drafted(requests, total, kv_length) if total else row[0]
        off = min(_HICCUP, max(1 / _HICCUP, seconds / (self.pace * predicted)))
        self.pace *= 1 + _PACE * (off - 1)
        wanted = total * measured / requests
        nearest = min((t for t in row if bool(t) == bool(total)), key=lambda t: abs(t - wanted))
        row[nearest] *= 1 + _WEIGHT * (off - 1)

    def missing(
        self, batch_sizes: Iterable[int], totals: Callable[[int], Sequence[int]], kv_length: int
    ) -> dict[int, list[int]]:
        """Returns what is to be measured, {B: [T, ..]} with T = 0 for the plain step: rows that lack anything, whole.

        The steps of a row are weighed against each other, so they must be of the same minutes of the machine.
        """
        known = self.seconds.get(kv_length, {})
        wanted = {b: [0, *totals(b)] for b in batch_sizes}
        unsteady = {b for b in wanted if self.unsteady.get((kv_length, b), os.getpid()) != os.getpid()}
        return {b: row for b, row in wanted.items() if b in unsteady or not known.get(b, {}).keys() >= set(row)}

    def measure(
        self,
        missing: dict[int, list[int]],
        kv_length: int,
        step: Callable[[int, int], None],
        clock: Callable[[], float] | None = None,
    ) -> float:
        """Times the missing entries and keeps their medians, evened out; returns the seconds it took.

        Args:
            missing: {B: [T, ..]}, as `missing` returns it: whole rows.
            kv_length: cells in use while measuring.
            step: runs one whole step of B requests and T packed tokens (0: plain) and waits for it.
            clock: gives seconds; this process's when None.
        """
        clock = clock or time.perf_counter
        begin = clock()
        with tqdm(desc="hf-dcut: measuring step costs", unit="step", disable=None, leave=False) as bar:

            def counted(requests: int, total: int) -> None:
                step(requests, total)
                bar.update()

            times = steadiest(missing, counted, clock)
        rows = self.seconds.setdefault(kv_length, {})
        for requests, row in times.items():
            rows[requests] = rising({total: statistics.median(values) for total, values in row.items()})
            self.unsteady.pop((kv_length, requests), None)
        unsteady = [requests for requests, row in times.items() if not is_steady(row)]
        self.unsteady |= {(kv_length, requests): os.getpid() for requests in unsteady}
        _tell_unsteady(unsteady)
        return clock() - begin

    def save(self) -> None:
        """Writes the table to its file, whole or not at all; warns where it cannot be written."""
        if self.path is None:
            return
        content = {
            "format": _FORMAT,
            "fingerprint": self.fingerprint,
            "draft_tokens": self.draft_tokens,
            "seconds": self.seconds,
            "unsteady": [[*entry, process] for entry, process in self.unsteady.items()],
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.path.parent, prefix=".part-") as folder:
                whole = Path(folder, self.path.name)
                whole.write_text(json.dumps(content, indent=1))
                os.replace(whole, self.path)
        except OSError as error:
            logger.warning("cost table %s cannot be written (%s): it will be measured again", self.path, error)

    def _load(self) -> None:
        """Takes over the file's entries if they fit; says why not otherwise, so that they are measured anew."""
        if self.path is None or not self.path.exists():
            return
        try:
            content = json.loads(self.path.read_text())
            fits = content["format"] == _FORMAT and content["fingerprint"] == self.fingerprint
            seconds = _read_seconds(content["seconds"]) if fits else {}
            unsteady = {(kv, b): process for kv, b, process in content.get("unsteady", [])} if fits else {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("cost table %s cannot be read or is damaged (%s): measuring anew", self.path, error)
            return
        if not fits:
            logger.warning("cost table %s was measured on another machine, model or version: measuring anew", self.path)
        self.seconds, self.unsteady = seconds, unsteady

    def _row(self, requests: int, kv_length: int) -> tuple[int, dict[int, float]]:
        """Returns the nearest measured B and its seconds, at the nearest K/V length that it was measured at.

        Another B changes a step by far more than another K/V length, and not every length was measured at every B.
        """
        if not self.seconds:
            raise ValueError("the cost table is empty: measure it with hf_dcut.warmup")
        # Between two equally near ones the larger batch stands in.
        measured = min({b for rows in self.seconds.values() for b in rows}, key=lambda b: (abs(b - requests), -b))
        kv = min((kv for kv, rows in self.seconds.items() if measured in rows), key=lambda kv: abs(kv - kv_length))
        return measured, self.seconds[kv][measured]

    def __str__(self) -> str:
        lines = [f"seconds of a step, D = {self.draft_tokens}"]
        for kv_length, by_batch in sorted(self.seconds.items()):
            lines.append(f"K/V length {kv_length}")
            for requests, row in sorted(by_batch.items()):
                full = requests * (self.draft_tokens + 1)
                cells = ["plain" if not t else f"{t / full:.0%}" for t in sorted(row)]
                values = [f"{cell} {row[t] * 1e3:.2f} ms" for cell, t in zip(cells, sorted(row), strict=True)]
                lines.append(f"  B = {requests:<3} " + "   ".join(values))
        return "\n".join(lines)


def open_table(where: str | os.PathLike[str] | CostTable, draft_tokens: int, fingerprint: dict[str, Any]) -> CostTable:
    """Returns the table that `DCutConfig.cost_table` names, with what its file already knows.

    Args:
        where: "auto" for the Hugging Face cache, "off" for memory only, a path, or a table.
        draft_tokens: D.
        fingerprint: what the seconds depend on.

    Raises:
        ValueError: a `CostTable` that was made for another number of draft tokens.
    """
    if isinstance(where, CostTable):
        if where.draft_tokens != draft_tokens:
            raise ValueError(
                f"dcut cost_table was measured for {where.draft_tokens} draft tokens and the drafter makes "
                f"{draft_tokens} (nodes, if they are trees): measure one with hf_dcut.warmup(model, drafter, "
                "batch_sizes, dcut) for the same draft_tree and draft_tokens"
            )
        return where
    fingerprint = {**fingerprint, "draft_tokens": draft_tokens}
    if where == "off":
        return CostTable(draft_tokens, fingerprint)
    path = Path(where)
    if where == "auto":
        digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:16]
        path = Path(HF_HOME) / "hf_dcut" / f"costs-{digest}.json"
    table = CostTable(draft_tokens, fingerprint, path)
    table._load()
    return table


def _tell_unsteady(batch_sizes: Sequence[int]) -> None:
    if batch_sizes:
        logger.warning(
            "step costs of %s varied by more than %.0f%% while they were measured: the machine is busy with other "
            "things, and budgets may be chosen badly. They will be measured again by the next process",
            *(", ".join(f"B = {requests}" for requests in batch_sizes), 100 * STEADY),
        )


def _read_seconds(content: dict[str, dict[str, dict[str, float]]]) -> dict[int, dict[int, dict[int, float]]]:
    """Returns the entries of a file with their keys as numbers; raises ValueError for anything that is not seconds."""
    seconds = {
        int(kv): {int(b): {int(t): float(s) for t, s in row.items()} for b, row in rows.items()}
        for kv, rows in content.items()
    }
    for rows in seconds.values():
        if not rows:
            raise ValueError("a K/V length without steps")
        for row in rows.values():
            if not row or not all(0 < s < float("inf") for s in row.values()):
                raise ValueError("a step without positive seconds")
    return seconds
