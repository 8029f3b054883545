"""The results of a job and what belongs to them.

    out.jsonl             one line a result, in the order they came
    out.jsonl.rejects     the lines of the input that cannot be answered, with the reasons
    out.jsonl.job/        run.json: whose results these are; lock; part-N.jsonl: results of process N of several

A result is there once its line is whole, and names the line of the input that is done. So a job that was killed goes on
with the lines that are missing, on any number of processes.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from accelerate import PartialState
from filelock import FileLock, Timeout

from hf_dcut.jobs.journal import Journal, OutputError, Write, encode, records, replace, write_all

STDOUT = "-"


@dataclass
class Tally:
    """What results came to.

    Attributes:
        done: numbers of the lines that have one.
        failed: results that are errors.
        tokens, steps, accepted: new tokens, decoding steps and committed drafts, summed over results.
        reasons: how often each finish reason came.
    """

    done: set[int] = field(default_factory=set)
    failed: int = 0
    tokens: int = 0
    steps: int = 0
    accepted: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, record: dict[str, Any]) -> None:
        """Counts one result."""
        self.done.add(record["line"])
        if "error" in record:
            self.failed += 1
            return
        self.tokens += record["tokens"]
        self.steps += record["stats"]["steps"]
        self.accepted += record["stats"]["accepted"]
        self.reasons[record["finish_reason"]] += 1

    @property
    def mean_accepted_tokens(self) -> float:
        """Tokens committed per request and decoding step, the target's own included; 0 without steps."""
        return (self.accepted + self.steps) / self.steps if self.steps else 0.0


class Output(Protocol):
    """Where results go. `tally` counts what is there."""

    tally: Tally

    def append(self, record: dict[str, Any]) -> None:
        """Writes one result; OutputError if that is not possible any more."""

    def finish(self) -> None:
        """Puts the results of all processes together, when each has written its own."""

    def close(self) -> None:
        """Forces everything to disk and lets go of it."""


class FileOutput:
    """Results in a file, beside what tells a later run how to go on.

    Args:
        path: of the results.
        run: JSON-able values that tell this run from others; same values, same results.
        retry_errors: whether lines whose result is an error are to be answered again.
        state: this process among those of the job.
        write: `os.write`, or one that fails, for tests.

    Raises:
        ValueError: the file holds something else, or another process writes it.
    """

    def __init__(
        self,
        path: Path,
        run: dict[str, Any],
        retry_errors: bool,
        state: PartialState,
        write: Write = os.write,
    ):
        self._path, self._state, self._write = path, state, write
        self._folder = path.with_name(f"{path.name}.job")
        self._lock = FileLock(self._folder / "lock", timeout=0)
        if state.is_main_process:
            self._claim(run, retry_errors)
        state.wait_for_everyone()
        self._compare(run)
        self.tally = _tally(path)
        alone = state.num_processes == 1
        self._journal = Journal(path if alone else self._folder / f"part-{state.process_index}.jsonl", write)
        # Nobody adds to the results before everybody knows which are there.
        state.wait_for_everyone()

    def append(self, record: dict[str, Any]) -> None:
        """Writes one result."""
        self._journal.append(record)
        self.tally.add(record)

    def finish(self) -> None:
        """Puts the parts together, when all processes are done."""
        if self._state.num_processes > 1:
            self._journal.sync()
            self._state.wait_for_everyone()
            if self._state.is_main_process:
                self._gather()
                self.tally = _tally(self._path)

    def close(self) -> None:
        """Forces the results to disk; another run may write then."""
        try:
            self._journal.close()
        finally:
            self._lock.release()

    def _claim(self, run: dict[str, Any], retry_errors: bool) -> None:
        """Makes the file this run's, or finds that it is, and brings it in order."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout:
            raise ValueError(f"output {self._path} is being written by another run: wait for it or end it") from None
        used = [path for path in (self._path, *self._parts()) if path.exists() and path.stat().st_size]
        if used and not self._mark.is_file():
            raise ValueError(f"output {self._path} exists and holds no results of this job: give another file")
        if used:
            self._compare(run)
        else:
            replace(self._mark, iter([run]))
        self._gather()
        if retry_errors:
            replace(self._path, (record for record in _results(self._path) if "error" not in record))

    @property
    def _mark(self) -> Path:
        return self._folder / "run.json"

    def _compare(self, run: dict[str, Any]) -> None:
        """Raises ValueError if the results are another run's, with what differs."""
        theirs = json.loads(self._mark.read_text())
        # Through JSON as well, in which tuples are lists.
        ours = json.loads(encode(run))
        names = sorted(name for name in theirs | ours if theirs.get(name) != ours.get(name))
        if names:
            differences = "; ".join(f"{name} was {theirs.get(name)!r}, is {ours.get(name)!r}" for name in names)
            raise ValueError(
                f"output {self._path} holds the results of another run ({differences}): give another file, or the "
                "values of that run to go on with it"
            )

    def _parts(self) -> list[Path]:
        return sorted(self._folder.glob("part-*.jsonl"))

    def _gather(self) -> None:
        """Moves the results in parts to the output; whatever is there already was moved before a crash."""
        parts = self._parts()
        if not parts:
            return
        done = _tally(self._path).done
        journal = Journal(self._path, self._write)
        try:
            for record in (record for part in parts for record in _results(part)):
                if record["line"] not in done:
                    journal.append(record)
                    done.add(record["line"])
        finally:
            journal.close()
        for part in parts:
            part.unlink()


class StreamOutput:
    """Results on standard output, which belongs to them alone: what else is printed goes to standard error."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self.tally = Tally()
        self._results = os.dup(1)
        os.dup2(2, 1)

    def append(self, record: dict[str, Any]) -> None:
        """Writes one result."""
        try:
            write_all(self._results, encode(record))
        except OSError as error:
            raise OutputError(f"standard output cannot be written: {error.strerror}") from error
        self.tally.add(record)

    def finish(self) -> None:
        """Nothing to put together: one process writes."""

    def close(self) -> None:
        """Gives standard output back."""
        sys.stdout.flush()
        os.dup2(self._results, 1)
        os.close(self._results)


def _tally(path: Path) -> Tally:
    tally = Tally()
    for record in _results(path):
        tally.add(record)
    return tally


def _results(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the results of a file; ValueError where a record is none."""
    for number, record in enumerate(records(path), 1):
        whole = isinstance(record.get("line"), int) and ("error" in record or {"tokens", "stats"} <= record.keys())
        if not whole:
            raise ValueError(f"{path}, line {number} is no result: the file was changed. Move it away, or mend it")
        yield record
