"""Jobs from input to output, mostly with a worker that needs no model: what is written, and what a stop leaves."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_dcut.jobs import runner
from hf_dcut.jobs.journal import OutputError
from hf_dcut.jobs.plan import Plan
from hf_dcut.jobs.runner import run

Make = Callable[..., Plan]
Read = Callable[[Path], list[dict[str, Any]]]
ENTRIES = [{"id": f"q{i}", "prompt": "abc"[: i % 3 + 1] + str(i)} for i in range(1, 12)]


@pytest.fixture
def entries(write_lines: Callable[..., Path]) -> Path:
    return write_lines(ENTRIES)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def said(lines: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    return sorted((line["id"], line["text"]) for line in lines)


EXPECTED = sorted((entry["id"], entry["prompt"][::-1]) for entry in ENTRIES)


def test_a_result_has_what_docs_say(
    make_plan: Make, write_lines: Callable[..., Path], out: Path, echo: Any, read_lines: Read
) -> None:
    write_lines([{"id": 9, "prompt": "abcd", "metadata": {"answer": "ü"}}, {"prompt": "xy"}])
    outcome = run(make_plan(token_ids=True), lambda *_: echo(window=1))
    stats = {"prompt_tokens": 4, "steps": 4, "kept": 8, "accepted": 4, "mean_accepted_tokens": 2.0, "seconds": 0.5}
    first = {"id": 9, "line": 1, "metadata": {"answer": "ü"}, "text": "dcba", "tokens": 4, "finish_reason": "length"}
    assert read_lines(out)[0] == {**first, "stats": stats, "token_ids": [100, 99, 98, 97]}
    assert read_lines(out)[1]["id"] == "2"
    assert outcome.complete
    assert (outcome.lines, outcome.rejected, outcome.tokens, outcome.main) == (2, 0, 6, True)
    run(make_plan(output=str(out.with_name("b.jsonl"))), lambda *_: echo())
    assert "token_ids" not in read_lines(out.with_name("b.jsonl"))[0]


@pytest.mark.usefixtures("entries")
def test_a_torn_output_goes_on_from_any_byte(make_plan: Make, out: Path, echo: Any, read_lines: Read) -> None:
    run(make_plan(), lambda *_: echo())
    whole = out.read_bytes()
    assert said(read_lines(out)) == EXPECTED
    for end in range(0, len(whole), 17):
        out.write_bytes(whole[:end])
        worker = echo(seed=end)
        outcome = run(make_plan(), lambda *_, worker=worker: worker)
        assert said(read_lines(out)) == EXPECTED
        assert len(worker.asked) == len(ENTRIES) - whole[:end].count(b"\n")
        assert outcome.complete
        assert len(outcome.results.done) == len(ENTRIES)


@pytest.mark.usefixtures("entries")
def test_a_finished_job_loads_nothing(make_plan: Make, out: Path, echo: Any) -> None:
    run(make_plan(), lambda *_: echo())
    before = out.read_bytes()

    def never(*_: Any) -> Any:
        raise AssertionError

    outcome = run(make_plan(), never)
    assert outcome.complete
    assert outcome.tokens == 0
    assert out.read_bytes() == before


@pytest.mark.usefixtures("entries")
@pytest.mark.parametrize("after", [0, 1, 5, 10])
def test_interrupts_leave_what_is_finished(make_plan: Make, out: Path, echo: Any, read_lines: Read, after: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(make_plan(), lambda *_: echo(stop_after=after))
    assert len(read_lines(out)) == after
    assert set(said(read_lines(out))) <= set(EXPECTED)
    run(make_plan(), lambda *_: echo(seed=1))
    assert said(read_lines(out)) == EXPECTED


@pytest.mark.usefixtures("entries")
def test_a_full_disk_stops_and_the_job_goes_on_later(
    make_plan: Make, out: Path, echo: Any, read_lines: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(make_plan(), lambda *_: echo())
    whole = out.read_bytes()
    for left in range(0, len(whole), 101):
        out.unlink()
        free = [left]

        def write(file: int, data: bytes, free: list[int] = free) -> int:
            if not free[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            taken = os.write(file, data[: free[0]])
            free[0] -= taken
            return taken

        with monkeypatch.context() as patch:
            patch.setattr("hf_dcut.jobs.output.FileOutput.__init__.__defaults__", (write,))
            with pytest.raises(OutputError, match="No space left on device"):
                run(make_plan(), lambda *_: echo())
        assert len(read_lines(out)) == whole[:left].count(b"\n")
        run(make_plan(), lambda *_: echo())
        assert said(read_lines(out)) == EXPECTED


@pytest.mark.usefixtures("entries")
def test_one_bad_request_fails_alone_and_is_tried_again_on_request(
    make_plan: Make, out: Path, echo: Any, read_lines: Read
) -> None:
    outcome = run(make_plan(), lambda *_: echo(fail_at=[4], refuse=[1, 6, 11]))
    errors = {line["id"]: line["error"] for line in read_lines(out) if "error" in line}
    assert errors == {"q4": "poison", **{f"q{i}": f"line {i} is too long" for i in (1, 6, 11)}}
    assert len(read_lines(out)) == len(ENTRIES)
    assert (outcome.complete, outcome.results.failed) == (False, 4)
    assert run(make_plan(), lambda *_: echo()).results.failed == 4
    assert run(make_plan(retry_errors=True), lambda *_: echo()).complete
    assert said(read_lines(out)) == EXPECTED


def test_all_lines_refused_still_end(make_plan: Make, entries: Path, out: Path, echo: Any, read_lines: Read) -> None:
    outcome = run(make_plan(), lambda *_: echo(refuse=range(1, 12)))
    assert outcome.results.failed == len(read_lines(out)) == 11


def test_a_worker_that_loses_a_request_is_found_out(make_plan: Make, entries: Path, echo: Any) -> None:
    worker = echo()
    answer = worker.answer
    worker.answer = lambda *given: (result for result in answer(*given) if result.request_id != "5")
    with pytest.raises(RuntimeError, match=r"lines \[5\] got no result"):
        run(make_plan(), lambda *_: worker)


BAD = [{"id": "a", "prompt": "x"}, b"not JSON", {"id": "a", "prompt": "y"}, {"id": "b", "prompt": "z"}]


def test_bad_lines_are_kept_and_the_rest_goes_on(
    make_plan: Make, write_lines: Callable[..., Path], out: Path, tmp_path: Path, echo: Any, read_lines: Read
) -> None:
    write_lines(BAD)
    outcome = run(make_plan(), lambda *_: echo())
    assert (outcome.complete, outcome.lines, outcome.rejected) == (False, 2, 2)
    rejects = read_lines(tmp_path / "out.jsonl.rejects")
    assert [(line["line"], line["error"].split(" ")[0], line["text"]) for line in rejects] == [
        (2, "not", "not JSON"),
        (3, "id", json.dumps(BAD[2])),
    ]
    run(make_plan(), lambda *_: echo())
    assert len(read_lines(tmp_path / "out.jsonl.rejects")) == 2


def test_strict_stops_before_anything_is_loaded(
    make_plan: Make, write_lines: Callable[..., Path], out: Path, echo: Any
) -> None:
    write_lines(BAD)
    with pytest.raises(ValueError, match=r"in\.jsonl, line 2: not JSON.*; and 1 more lines"):
        run(make_plan(strict=True), lambda *_: echo())
    assert {path.name for path in out.parent.iterdir()} == {"in.jsonl"}


@pytest.mark.parametrize(("lines", "reason"), [([], "has no lines"), ([b"x", b"y"], "line 1: not JSON")])
def test_nothing_to_answer(
    make_plan: Make, write_lines: Callable[..., Path], lines: list[bytes], reason: str, echo: Any
) -> None:
    write_lines(lines)
    with pytest.raises(ValueError, match=reason):
        run(make_plan(), lambda *_: echo())


def test_another_input_or_model_is_another_run(
    make_plan: Make, write_lines: Callable[..., Path], out: Path, tiny_folder: Path, tmp_path: Path, echo: Any
) -> None:
    write_lines(ENTRIES)
    run(make_plan(), lambda *_: echo())
    before = out.read_bytes()
    with pytest.raises(ValueError, match=r"another run \(max_new_tokens was 12, is 13\)"):
        run(make_plan(max_new_tokens=13), lambda *_: echo())
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="target revision was"):
        run(make_plan(target=str(other)), lambda *_: echo())
    write_lines([*ENTRIES[1:], b"oops"])
    with pytest.raises(ValueError, match=r"another run \(input was"):
        run(make_plan(), lambda *_: echo())
    assert not (tmp_path / "out.jsonl.rejects").exists()
    assert out.read_bytes() == before


@pytest.mark.usefixtures("entries")
def test_a_drafter_beside_prompt_lookup_is_told_by_its_folder(make_plan: Make, tmp_path: Path, echo: Any) -> None:
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    run(make_plan(drafter=f"{folder}+lookup"), lambda *_: echo())
    with pytest.raises(ValueError, match=r"another run \(drafter was"):
        run(make_plan(drafter=str(folder)), lambda *_: echo())
    (folder / "config.json").write_text("{ }")
    with pytest.raises(ValueError, match="drafter revision was"):
        run(make_plan(drafter=f"{folder}+lookup"), lambda *_: echo())


@pytest.mark.parametrize("which", ["input", "output"])
def test_several_processes_want_files(make_plan: Make, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PartialState", lambda **_: SimpleNamespace(num_processes=2))
    with pytest.raises(ValueError, match="2 processes share a job: give files"):
        run(make_plan(**{which: "-"}))


def test_ids_name_no_files(
    make_plan: Make, write_lines: Callable[..., Path], out: Path, tmp_path: Path, echo: Any, read_lines: Read
) -> None:
    names = ["../escape", "/tmp/x", "a/b", "..", "\0", "out.jsonl", "C:\\x", "%s{0}$HOME"]
    write_lines([{"id": name, "prompt": name, "metadata": name} for name in names])
    run(make_plan(), lambda *_: echo())
    assert sorted(line["id"] for line in read_lines(out)) == sorted(names)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert files == {"in.jsonl", "out.jsonl", "out.jsonl.job", "out.jsonl.job/lock", "out.jsonl.job/run.json"}


def test_results_on_standard_output(
    make_plan: Make, entries: Path, echo: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run(make_plan(output="-"), lambda *_: echo())
    stdout, stderr = capfd.readouterr()
    assert said([json.loads(line) for line in stdout.splitlines()]) == EXPECTED
    assert "11/11" in stderr
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl"}


def test_on_the_tiny_target(make_plan: Make, entries: Path, out: Path, read_lines: Read) -> None:
    outcome = run(make_plan(max_batch_size=3))
    assert outcome.complete
    assert sum(line["tokens"] for line in read_lines(out)) == outcome.tokens > 0
    assert {line["finish_reason"] for line in read_lines(out)} <= {"eos", "length"}
