"""The command line: arguments, words to the person who waits, exit codes."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_dcut.cli import main
from hf_dcut.jobs import runner
from hf_dcut.jobs.command import summary
from hf_dcut.jobs.journal import OutputError
from hf_dcut.jobs.output import Tally
from hf_dcut.jobs.plan import Plan
from hf_dcut.jobs.runner import Outcome


@pytest.fixture
def arguments(tmp_path: Path, tiny_folder: Path, write_lines: Callable[..., Path]) -> list[str]:
    write_lines([{"prompt": "abc"}, {"prompt": "de"}])
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    return [
        "run",
        *files,
        "--target",
        str(tiny_folder),
        "--drafter",
        "lookup",
        "--budget",
        "0.5",
        "--max-new-tokens",
        "5",
    ]


def outcome(rejected: int = 0, failed: int = 0, **fields: Any) -> Outcome:
    tally = Tally({1, 2}, failed, 30, 10, 20, Counter(eos=2 - failed))
    return Outcome(
        **{"lines": 2, "rejected": rejected, "results": tally, "tokens": 30, "seconds": 2.0, "main": True} | fields
    )


def planned(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Plan:
    plans: list[Plan] = []
    monkeypatch.setattr(runner, "run", lambda plan: plans.append(plan) or outcome())
    assert main(arguments) == 0
    return plans[0]


def test_arguments_become_the_plan(arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = planned(arguments, monkeypatch)
    assert plan == Plan(
        str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), plan.target, "lookup", budget=0.5, max_new_tokens=5
    )
    more = "--temperature 0 --top-p 0.9 --top-k 4 --min-p 0.1 --repetition-penalty 1.1 --seed 3 --dtype bfloat16 "
    more += "--max-batch-size 7 --max-prompt-tokens 9 --thinking --token-ids --strict --retry-errors --budget auto "
    more += "--target-revision a --drafter-revision b --trust-remote-code --rejects r.jsonl"
    assert planned([*arguments, *more.split()], monkeypatch) == Plan(
        input=plan.input,
        output=plan.output,
        target=plan.target,
        drafter="lookup",
        target_revision="a",
        drafter_revision="b",
        dtype="bfloat16",
        budget="auto",
        max_batch_size=7,
        max_prompt_tokens=9,
        max_new_tokens=5,
        options={"temperature": 0.0, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1},
        seed=3,
        thinking=True,
        token_ids=True,
        rejects=Path("r.jsonl"),
        strict=True,
        retry_errors=True,
        trust_remote_code=True,
    )


@pytest.mark.parametrize(
    ("ended", "code", "words"),
    [
        (outcome(), 0, "2 of 2 lines answered (eos 2)\n  30 new tokens in 2.0 s: 15.0 tokens/s, 3.00 a request"),
        (outcome(rejected=1), 3, "2 of 3 lines answered (eos 2)\n  1 rejected: "),
        (outcome(failed=1), 3, "1 of 2 lines answered (eos 1)\n  1 failed: "),
        (outcome(main=False, failed=1), 0, ""),
        (KeyboardInterrupt(), 130, "interrupted; finished results are written. The same command goes on from there."),
        (OutputError("out.jsonl cannot be written: No space"), 4, "stopped: out.jsonl cannot be written: No space"),
        (ValueError("seed=-1"), 2, "seed=-1"),
        (FileNotFoundError(2, "No such file", "in.jsonl"), 2, "in.jsonl"),
    ],
)
def test_exit_codes(
    arguments: list[str],
    ended: Any,
    code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(plan: Plan) -> Outcome:
        if isinstance(ended, BaseException):
            raise ended
        return ended

    monkeypatch.setattr(runner, "run", run)
    assert main(arguments) == code
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert words in stderr


def test_a_fault_of_ours_is_not_hidden(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(plan: Plan) -> Outcome:
        raise RuntimeError("no")

    monkeypatch.setattr(runner, "run", run)
    with pytest.raises(RuntimeError):
        main(arguments)


def test_sigterm_ends_as_an_interrupt(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(runner, "run", lambda plan: os.kill(os.getpid(), signal.SIGTERM) or signal.pause())
    assert main(arguments) == 143
    assert "terminated; finished results are written" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--budget", "lots"], "give auto or a share in (0, 1]"),
        (["--budget", "1.5"], "budget=1.5"),
        (["--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--max-batch-size", "-3"], "max_batch_size=-3"),
        (["--top-p", "2"], "option top_p=2.0: give a number in (0, 1]"),
        (["--temperature", "nan"], "option temperature=nan"),
        (["--input", "/no/such.jsonl"], "/no/such.jsonl"),
        (["--target", "/no/such/folder"], "/no/such/folder"),
        (["--drafter", "/no/such/folder"], "/no/such/folder"),
        (["--target-revision", "main"], "is a folder, which has no revisions"),
        (["--dtype", "float3"], "float3"),
    ],
)
def test_wrong_arguments_end_with_2_and_write_no_result(
    arguments: list[str], more: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    try:
        code = main([*arguments, *more])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").read_bytes()


def test_a_job_and_the_same_again(arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(arguments) == 0
    assert "2 of 2 lines answered" in capsys.readouterr().err
    before = (tmp_path / "out.jsonl").read_bytes()
    assert main(arguments) == 0
    assert "2 of 2 lines answered" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert main([*arguments, "--seed", "1"]) == 2
    assert "another run (seed was 0, is 1)" in capsys.readouterr().err


def test_help_tells_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    text = capsys.readouterr().out
    assert all(f"\n  {code} " in text for code in (0, 1, 2, 3, 4, 130))
    assert max(map(len, text.splitlines())) <= 120


def test_rejects_without_a_file_are_pointed_out(make_plan: Callable[..., Plan]) -> None:
    assert "1 rejected: not kept; --rejects FILE keeps them" in summary(make_plan(output="-"), outcome(rejected=1))
