"""Results and what belongs to them: whose they are, who writes, parts of several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_dcut.jobs.journal import OutputError
from hf_dcut.jobs.output import FileOutput, StreamOutput, Tally

RUN = {"target": "a", "seed": 0, "options": {}}
Read = Callable[[Path], list[dict[str, Any]]]


def record(line: int, tokens: int = 4) -> dict[str, Any]:
    stats = {"steps": 2, "kept": 5, "accepted": 1}
    return {"id": str(line), "line": line, "text": "x", "tokens": tokens, "finish_reason": "eos", "stats": stats}


def open_output(
    path: Path, run: dict[str, Any] = RUN, retry: bool = False, rank: int = 0, world: int = 1
) -> FileOutput:
    wait = lambda: None  # noqa: E731 (nobody to wait for)
    state = SimpleNamespace(num_processes=world, process_index=rank, is_main_process=rank == 0, wait_for_everyone=wait)
    return FileOutput(path, run, retry, state)


def test_results_are_counted_and_found_again(tmp_path: Path, read_lines: Read) -> None:
    path = tmp_path / "deep" / "out.jsonl"
    output = open_output(path)
    output.append(record(3))
    output.append({"id": "5", "line": 5, "error": "poison"})
    output.close()
    again = open_output(path)
    assert again.tally == output.tally == Tally({3, 5}, 1, 4, 2, 1, again.tally.reasons)
    assert again.tally.reasons == {"eos": 1}
    assert again.tally.mean_accepted_tokens == 1.5
    again.append(record(4))
    again.close()
    assert [x["line"] for x in read_lines(path)] == [3, 5, 4]
    assert sorted(p.name for p in tmp_path.joinpath("deep").iterdir()) == ["out.jsonl", "out.jsonl.job"]


def test_results_of_another_run_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    output = open_output(path)
    output.append(record(1))
    output.close()
    before = path.read_bytes()
    with pytest.raises(
        ValueError, match=r"out\.jsonl holds the results of another run \(seed was 0, is 1; target was 'a'"
    ):
        open_output(path, {**RUN, "seed": 1, "target": "b"})
    with pytest.raises(ValueError, match="extra was None, is 2"):
        open_output(path, {**RUN, "extra": 2})
    assert path.read_bytes() == before
    open_output(path, RUN | {"seed": 0}).close()


def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("my notes\n")
    with pytest.raises(ValueError, match="exists and holds no results of this job"):
        open_output(path)
    assert path.read_text() == "my notes\n"


def test_an_empty_file_or_a_removed_one_is_free_for_another_run(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.touch()
    output = open_output(path)
    output.append(record(1))
    output.close()
    path.unlink()
    output = open_output(path, {**RUN, "seed": 1})
    assert output.tally.done == set()
    output.close()


def test_a_changed_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    open_output(path).close()
    path.write_text('{"id": "1", "line": 1, "error": "x"}\n{"id": "2"}\n')
    with pytest.raises(ValueError, match=r"out\.jsonl, line 2 is no result"):
        open_output(path)


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = open_output(path)
    with pytest.raises(ValueError, match="is being written by another run"):
        open_output(path)
    first.close()
    open_output(path).close()


def test_errors_are_made_again_on_request(tmp_path: Path, read_lines: Read) -> None:
    path = tmp_path / "out.jsonl"
    output = open_output(path)
    for line in (record(1), {"id": "2", "line": 2, "error": "poison"}, record(3)):
        output.append(line)
    output.close()
    open_output(path).close()
    assert len(read_lines(path)) == 3
    output = open_output(path, retry=True)
    assert output.tally.done == {1, 3}
    assert output.tally.failed == 0
    output.close()
    assert [x["line"] for x in read_lines(path)] == [1, 3]


def test_parts_are_put_together(tmp_path: Path, read_lines: Read) -> None:
    path = tmp_path / "out.jsonl"
    main, other = (open_output(path, rank=rank, world=2) for rank in (0, 1))
    main.append(record(1))
    other.append(record(2, tokens=7))
    assert not path.exists()
    assert main.tally.done == {1}
    other.finish()
    main.finish()
    main.close()
    other.close()
    assert sorted(x["line"] for x in read_lines(path)) == [1, 2]
    assert main.tally.done == {1, 2}
    assert main.tally.tokens == 11
    assert not list(tmp_path.rglob("part-*"))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_parts_of_killed_processes_are_kept_by_any_number(tmp_path: Path, world: int, read_lines: Read) -> None:
    path = tmp_path / "out.jsonl"
    killed = [open_output(path, rank=rank, world=2) for rank in (0, 1)]
    for line in (1, 2, 3, 4):
        killed[line % 2].append(record(line))
    killed[0].close()
    with (tmp_path / "out.jsonl.job" / "part-1.jsonl").open("ab") as file:
        file.write(b'{"id": "6", "li')
    outputs = [open_output(path, rank=rank, world=world) for rank in range(world)]
    assert [output.tally.done for output in outputs] == [{1, 2, 3, 4}] * world
    outputs[-1].append(record(6))
    for output in reversed(outputs):
        output.finish()
        output.close()
    assert sorted(x["line"] for x in read_lines(path)) == [1, 2, 3, 4, 6]


def test_a_crash_while_parts_are_put_together_doubles_nothing(tmp_path: Path, read_lines: Read) -> None:
    path = tmp_path / "out.jsonl"
    output = open_output(path, world=2)
    for line in range(1, 6):
        output.append(record(line))
    output.close()
    part = tmp_path / "out.jsonl.job" / "part-0.jsonl"
    data = part.read_bytes()
    for end in range(0, len(data), 11):
        path.write_bytes(data[:end])
        part.write_bytes(data)
        open_output(path).close()
        assert [x["line"] for x in read_lines(path)] == [1, 2, 3, 4, 5]


def test_a_process_of_another_run_is_refused(tmp_path: Path) -> None:
    open_output(tmp_path / "out.jsonl", world=2).close()
    with pytest.raises(ValueError, match="seed was 0, is 1"):
        open_output(tmp_path / "out.jsonl", {**RUN, "seed": 1}, rank=1, world=2)


def test_standard_output_has_results_alone(capfd: pytest.CaptureFixture[str]) -> None:
    output = StreamOutput()
    os.write(1, b"a library talks\n")
    output.append({"line": 1, "error": "ü"})
    output.close()
    os.write(1, b"back\n")
    assert capfd.readouterr() == ('{"line": 1, "error": "ü"}\nback\n', "a library talks\n")


@pytest.fixture
def stdout_is(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[[int], None]]:
    """`stdout_is(file)`: makes a file standard output until the test ends."""
    stdout = os.dup(1)
    yield lambda file: os.dup2(file, 1) and None
    os.dup2(stdout, 1)
    os.close(stdout)


def test_a_closed_pipe_stops(stdout_is: Callable[[int], None]) -> None:
    reader, writer = os.pipe()
    stdout_is(writer)
    os.close(writer)
    output = StreamOutput()
    os.close(reader)
    with pytest.raises(OutputError, match="standard output cannot be written: Broken pipe"):
        output.append({"line": 1, "error": ""})
    output.close()


def test_a_full_device_stops(stdout_is: Callable[[int], None]) -> None:
    with open("/dev/full", "wb") as full:
        stdout_is(full.fileno())
    output = StreamOutput()
    with pytest.raises(OutputError, match="standard output cannot be written: No space left on device"):
        output.append({"line": 1, "error": ""})
    output.close()
