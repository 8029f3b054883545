"""`Journal`: a file of JSON lines that only grows, by whole lines.

A line is handed to the system at once, so a killed process loses none; the file is forced to disk at least once a
second while lines come, and at the end. Whatever a crash or a full disk leaves of a line is cut.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# How `os.write` is called.
Write = Callable[[int, memoryview], int]
SYNC_SECONDS = 1.0
_BLOCK = 1 << 16


class OutputError(Exception):
    """Results cannot be written any more: a full disk, a closed pipe. Those written before are whole."""


class Journal:
    """Appends lines to a file, after cutting what is left of a torn one.

    Args:
        path: of the file, made if need be.
        write: `os.write`, or one that fails, for tests.
    """

    def __init__(self, path: Path, write: Write = os.write):
        self._name, self._write = str(path), write
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = _whole(self._file)
        os.ftruncate(self._file, self._size)
        self._synced = time.monotonic()

    def append(self, record: dict[str, Any]) -> None:
        """Writes one line.

        Raises:
            OutputError: the system refused; the file ends with the line before.
        """
        data = encode(record)
        try:
            write_all(self._file, data, self._write)
            self._size += len(data)
            if time.monotonic() - self._synced >= SYNC_SECONDS:
                self.sync()
        except OSError as error:
            self._cut()
            raise OutputError(f"{self._name} cannot be written: {error.strerror or error}") from error

    def sync(self) -> None:
        """Waits until all lines are on disk."""
        os.fsync(self._file)
        self._synced = time.monotonic()

    def close(self) -> None:
        """Forces the file to disk and closes it."""
        try:
            self.sync()
        except OSError as error:
            raise OutputError(f"{self._name} cannot be written: {error.strerror or error}") from error
        finally:
            os.close(self._file)

    def _cut(self) -> None:
        try:
            os.ftruncate(self._file, self._size)
        except OSError:
            return  # the disk is gone altogether; whoever opens the file next cuts it


def encode(record: dict[str, Any]) -> bytes:
    """Returns the record as a line of UTF-8."""
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def write_all(file: int, data: bytes, write: Write = os.write) -> None:
    """Writes all bytes to a file descriptor: the system may take them in pieces."""
    view = memoryview(data)
    while view:
        view = view[write(file, view) :]


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Yields what a journal holds, without a torn last line; nothing if there is no file.

    Raises:
        ValueError: a whole line that is no JSON object.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.endswith(b"\n"):
                return
            try:
                record = json.loads(raw)
            except ValueError:
                record = None
            if not isinstance(record, dict):
                raise ValueError(f"{path}, line {number} is no result: the file was changed. Move it away, or mend it")
            yield record


def replace(path: Path, lines: Iterator[dict[str, Any]]) -> None:
    """Puts a file with these lines in the place of another, at once: a crash leaves either of the two."""
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("wb") as file:
        for line in lines:
            file.write(encode(line))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _whole(file: int) -> int:
    """Returns how many bytes of a file its whole lines take."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - _BLOCK)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
