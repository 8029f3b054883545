"""Real processes, killed at several moments: the job goes on, and no line is lost or doubled."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hf_dcut.cli import main

pytestmark = pytest.mark.slow

LINES, TOKENS = 14, 100
COMMAND = [sys.executable, "-P", "-m", "hf_dcut.cli"]
# Accelerate's --cpu starts one process where there is no MPI; --multi_gpu starts them on CPUs too.
LAUNCH = [sys.executable, "-P", "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
LAUNCH += ["-m", "hf_dcut.cli"]
Read = Callable[[Path], list[dict[str, Any]]]


@pytest.fixture
def job(tmp_path: Path, tiny_folder: Path, write_lines: Callable[..., Path]) -> Callable[..., list[str]]:
    """`job(name)`: the arguments of a job that samples, with results in the file of that name."""
    write_lines([{"id": f"q{i}", "prompt": "abcdefgh"[: i % 5 + 1] * 3} for i in range(LINES)])

    def arguments(name: str) -> list[str]:
        files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / name)]
        options = ["--max-new-tokens", str(TOKENS), "--temperature", "1", "--token-ids", "--max-batch-size", "2"]
        return ["run", *files, "--target", str(tiny_folder), "--drafter", "lookup", "--budget", "0.5", *options]

    return arguments


def heed_interrupts() -> None:
    """Undoes what tests inherit when they are started in the background of a script: there SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def kill_when(command: list[str], ready: Callable[[], bool], how: signal.Signals) -> int:
    """Returns the exit code of a command that gets a signal, with all its children, as soon as it is ready for it."""
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=heed_interrupts)
    while not ready():
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.005)
    # Accelerate's launcher gives its children sessions of their own, so the group of the launcher is not all.
    own = psutil.Process(process.pid)
    for each in [own, *own.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(how)
    return process.wait(60)


def count(folder: Path, name: str) -> int:
    files = [folder / name, *(folder / f"{name}.job").glob("part-*")]
    return sum(path.read_bytes().count(b"\n") for path in files if path.exists())


def said(lines: list[dict[str, Any]]) -> list[Any]:
    return sorted((line["id"], line["line"], line["text"], line["token_ids"], line["finish_reason"]) for line in lines)


@pytest.fixture
def unbroken(job: Callable[..., list[str]], tmp_path: Path, read_lines: Read) -> list[Any]:
    assert main(job("whole.jsonl")) == 0
    lines = said(read_lines(tmp_path / "whole.jsonl"))
    assert len(lines) == LINES
    assert len({line[2] for line in lines}) > LINES // 2
    return lines


def test_killed_at_several_moments(
    job: Callable[..., list[str]], tmp_path: Path, read_lines: Read, unbroken: list[Any]
) -> None:
    command, name = [*COMMAND, *job("out.jsonl")], "out.jsonl"
    mark = tmp_path / "out.jsonl.job" / "run.json"
    for ready in (mark.exists, lambda: count(tmp_path, name) >= 1, lambda: count(tmp_path, name) >= LINES // 2):
        assert kill_when(command, ready, signal.SIGKILL) == -signal.SIGKILL
    assert LINES // 2 <= count(tmp_path, name) < LINES
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0
    assert ended.stdout == ""
    assert f"{LINES} of {LINES} lines answered" in ended.stderr
    assert said(read_lines(tmp_path / name)) == unbroken


def test_interrupted(job: Callable[..., list[str]], tmp_path: Path, read_lines: Read, unbroken: list[Any]) -> None:
    command, name = [*COMMAND, *job("out.jsonl")], "out.jsonl"
    assert kill_when(command, lambda: count(tmp_path, name) >= 2, signal.SIGINT) == 130
    assert 2 <= len(read_lines(tmp_path / name)) < LINES
    assert kill_when(command, lambda: count(tmp_path, name) >= 6, signal.SIGTERM) == 143
    assert 6 <= len(read_lines(tmp_path / name)) < LINES
    subprocess.run(command, check=True)
    assert said(read_lines(tmp_path / name)) == unbroken


def test_two_processes_killed_then_one(
    job: Callable[..., list[str]], tmp_path: Path, read_lines: Read, unbroken: list[Any]
) -> None:
    subprocess.run([*LAUNCH, *job("both.jsonl")], check=True)
    assert said(read_lines(tmp_path / "both.jsonl")) == unbroken
    assert {path.name for path in (tmp_path / "both.jsonl.job").iterdir()} == {"lock", "run.json"}

    name = "out.jsonl"
    kill_when([*LAUNCH, *job(name)], lambda: count(tmp_path, name) >= 5, signal.SIGKILL)
    assert len(list((tmp_path / f"{name}.job").glob("part-*"))) == 2
    subprocess.run([*COMMAND, *job(name)], check=True)
    assert said(read_lines(tmp_path / name)) == unbroken
