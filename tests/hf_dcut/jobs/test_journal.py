"""A file that only grows by whole lines: torn ones, full disks, files replaced at once."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hf_dcut.jobs import journal
from hf_dcut.jobs.journal import Journal, OutputError, records, replace

LINES: list[dict[str, Any]] = [{"line": 1, "text": "Grüße\n"}, {"line": 2}, {"line": 3, "text": "x" * 300}]


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    file = Journal(path)
    append(file, lines)
    file.close()


def append(file: Journal, lines: list[dict[str, Any]]) -> None:
    for line in lines:
        file.append(line)


def test_lines_come_back(tmp_path: Path) -> None:
    path = tmp_path / "out"
    write(path, LINES[:1])
    write(path, LINES[1:])
    assert list(records(path)) == LINES
    assert path.read_text(encoding="utf-8") == "".join(json.dumps(x, ensure_ascii=False) + "\n" for x in LINES)


def test_no_file_holds_nothing(tmp_path: Path) -> None:
    assert list(records(tmp_path / "out")) == []


def test_a_line_torn_at_any_byte_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_BLOCK", 7)  # many blocks to look through
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    write(whole, LINES)
    data = whole.read_bytes()
    for end in range(len(data)):
        torn.write_bytes(data[:end])
        kept = data[:end].count(b"\n")
        assert list(records(torn)) == LINES[:kept]
        write(torn, [{"line": 9}])
        assert list(records(torn)) == [*LINES[:kept], {"line": 9}]


def test_zeros_that_a_power_cut_leaves_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "out"
    write(path, LINES)
    with path.open("ab") as file:
        file.write(b"\0" * 5000)
    write(path, [{"line": 9}])
    assert list(records(path)) == [*LINES, {"line": 9}]


@pytest.mark.parametrize("middle", [b"not JSON\n", b"\n", b"[1]\n", b"\xff\n"])
def test_a_changed_line_is_named(tmp_path: Path, middle: bytes) -> None:
    path = tmp_path / "out"
    path.write_bytes(b'{"line": 1}\n' + middle + b'{"line": 2}\n')
    with pytest.raises(ValueError, match=r"out, line 2 is no result"):
        list(records(path))


class FullDisk:
    """Stands in for `os.write` on a disk that takes so many bytes more."""

    def __init__(self, left: int):
        self.left = left

    def __call__(self, file: int, data: bytes) -> int:
        if not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = os.write(file, data[: self.left])
        self.left -= taken
        return taken


def test_a_disk_that_fills_at_any_byte_leaves_whole_lines(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    write(whole, LINES)
    data = whole.read_bytes()
    for left in range(len(data)):
        path = tmp_path / f"out{left}"
        file = Journal(path, FullDisk(left))
        with pytest.raises(OutputError, match=f"out{left} cannot be written: No space left on device"):
            append(file, LINES)
        file.close()
        assert path.read_bytes() == data[: data[:left].rfind(b"\n") + 1]


def test_writes_in_pieces_come_out_whole(tmp_path: Path) -> None:
    file = Journal(tmp_path / "out", lambda fd, data: os.write(fd, data[:3]))
    append(file, LINES)
    file.close()
    assert list(records(tmp_path / "out")) == LINES


def test_disk_is_waited_for_in_between_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, syncs = [0.0], []
    monkeypatch.setattr(journal.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(journal.os, "fsync", lambda fd: syncs.append(now[0]))
    file = Journal(tmp_path / "out")
    for now[0] in (0.1, 0.9, 1.0, 1.5, 2.1):
        file.append({"line": 1})
    file.close()
    assert syncs == [1.0, 2.1, 2.1]


def test_a_disk_that_refuses_to_sync_stops_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    file = Journal(tmp_path / "out")
    file.append({"line": 1})
    monkeypatch.setattr(journal.os, "fsync", fail)
    with pytest.raises(OutputError, match="Disk quota exceeded"):
        file.close()


def test_replace_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out"
    write(path, LINES)

    def broken() -> Any:
        yield {"line": 7}
        raise RuntimeError

    with pytest.raises(RuntimeError):
        replace(path, broken())
    assert list(records(path)) == LINES
    replace(path, iter([{"line": 7}]))
    assert list(records(path)) == [{"line": 7}]
