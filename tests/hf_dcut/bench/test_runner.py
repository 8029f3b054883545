"""A whole run on a tiny model: tables, file, going on after a kill, the report and the replay of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_dcut.bench import runner
from hf_dcut.bench.journal import Journal
from hf_dcut.bench.plan import Plan
from hf_dcut.bench.runner import bench
from hf_dcut.cli import main

METHODS = ("generate", "plain", "1.0", "auto", "prompt-lookup")
TWICE = {"draft_tokens": (15, 4), "temperatures": (0.0, 1.0), "rounds": 1, "record": 4}


def plan(folder: Path, **changes: Any) -> Plan:
    data = tuple(str(folder / f"{name}.jsonl") for name in ("one", "two"))
    values = {"data": data, "batch_sizes": (1, 3), "methods": METHODS, "prompts": 4, "max_new_tokens": 5, "rounds": 2}
    return Plan(target=str(folder), drafter="oracle", **(values | changes))


@pytest.fixture(scope="module")
def run_file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with two data sets, two draft lengths, two temperatures, and recorded drafts."""
    out = tmp_path_factory.mktemp("run") / "run.jsonl"
    bench(plan(folder, out=out, **TWICE))
    return out


@pytest.mark.slow
def test_a_run_measures_every_cell(run_file: Path, folder: Path) -> None:
    journal = Journal.read(run_file)
    cells = journal.cells()
    assert len(cells) == 16
    assert journal.header["plan"]["methods"] == list(METHODS)
    assert journal.header["skipped_prompts"] == dict.fromkeys(journal.header["plan"]["data"], 0)
    for cell in cells:
        assert len(cell.rounds) == 1
        assert cell.prompts == 4
        assert ("prompt-lookup" in cell.methods) == (cell.key.batch == 1)
        assert all(cell.mismatches(method) == 0 for method in cell.methods)
        assert all((cell.speed(method) or 0) > 0 for method in cell.methods)
        for method in cell.methods:
            sampled_upstream = cell.key.temperature and method in ("generate", "prompt-lookup")
            assert cell.same_output(method) == ("-" if sampled_upstream else "4/4")
    assert journal.recorded() == journal.header["plan"]["data"]
    assert all(len(journal.traces(name)) == 4 for name in journal.recorded())
    assert journal.surface(15) is not None
    assert journal.surface(4) is not None


@pytest.mark.slow
def test_a_finished_run_says_its_tables_again_without_measuring(
    run_file: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run_file.read_bytes()
    monkeypatch.setattr(runner, "run_rounds", None)
    cells = bench(plan(folder, out=run_file, **TWICE))
    assert len(cells) == 16
    assert run_file.read_bytes() == before
    printed = capsys.readouterr().out
    assert printed.count("| method") == 16
    assert "minute" not in printed


def test_a_killed_run_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run.jsonl"
    small = plan(folder, out=out, methods=("plain", "1.0"), batch_sizes=(2,), rounds=3)
    real, written = Journal.write, []

    def dies(journal: Journal, line: dict[str, Any]) -> None:
        real(journal, line)
        written.append(line["kind"])
        if written.count("round") == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "write", dies)
        with pytest.raises(KeyboardInterrupt):
            bench(small)
    with out.open("a") as file:
        file.write('{"kind": "round", "half')
    bench(small)
    rounds = [line for line in map(json.loads, out.read_text().splitlines()) if line["kind"] == "round"]
    assert sorted((line["cell"]["data"], line["round"]) for line in rounds) == sorted(
        (data, number) for data in small.data for number in range(3)
    )
    with pytest.raises(ValueError, match="holds a run with rounds=3, not 4"):
        bench(plan(folder, out=out, methods=("plain", "1.0"), batch_sizes=(2,), rounds=4))


def test_what_is_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench(plan(folder, data=(str(folder / "one.jsonl"),), batch_sizes=(3,), methods=("generate", "auto"), show=2))
    printed = capsys.readouterr().out
    assert "1 cell, 2 methods: about 1 minute if every method were as fast as plain decoding" in printed
    assert printed.count("\n> w") == 2
    table = [line for line in printed.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in table[0].split("|")[1:-1]] == [
        *("method", "tokens/s", "vs generate", "mean accepted", "kept", "drafted steps", "same output")
    ]
    assert [line.split("|")[-2].strip() for line in table[2:]] == ["8/8", "8/8"]


def test_long_prompts_are_left_out_and_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = {"data": (str(folder / "one.jsonl"),), "batch_sizes": (2,), "methods": ("plain",), "rounds": 1}
    (cell,) = bench(plan(folder, max_prompt_tokens=3, **one))
    assert "4 prompts of " in capsys.readouterr().out  # of 2, 3, 4, 5, 2, .. tokens
    assert {entry["prompt_tokens"] for entry in cell.rounds} == {10}
    with pytest.raises(ValueError, match="all 8 prompts have more than 1 tokens"):
        bench(plan(folder, max_prompt_tokens=1, **one))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ("fast",)}, "method 'fast'"),
        ({"methods": ("plain", "plain")}, "each once"),
        ({"methods": ("assisted",)}, "give --assistant"),
        ({"batch_sizes": (0,)}, "give positive integers"),
        ({"prompts": 0}, "prompts=0"),
        ({"temperatures": (-1.0,)}, "0 for greedy"),
        ({"draft_tokens": (16,)}, "the drafter makes 15, give at most that"),
        ({"data": ("nothing",)}, "data='nothing': give a JSON-lines file"),
        ({"methods": ("prompt-lookup",), "batch_sizes": (2,)}, "none of them runs in the cell"),
        ({"methods": ("short-auto",), "draft_tokens": (4,)}, "which a OracleDrafter does not have"),
    ],
)
def test_what_cannot_be_measured(changes: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        bench(plan(folder, **changes))


@pytest.mark.slow
def test_the_report(run_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["bench", "report", str(run_file), "--out", str(tmp_path / "report")]) == 0
    text = (tmp_path / "report" / "README.md").read_text()
    for title in (
        "## Alarms",
        "## What must hold",
        "## Table 1",
        "## Table 2",
        "## Table 3",
        "## Figure 4",
        "## Figure 5",
        "## Figure 6",
        "## Figure 2",
        "## Figure 7",
        "## Equal budgets",
        "## Other machines, by replay",
        "## Acceptance by place",
        "## Every cell",
    ):
        assert title in text
    assert "paper: D-cut (16)" in text
    assert "auto (16)" in text
    assert "auto (5)" in text
    assert text.count("### ") == 16
    figures = sorted(path.name for path in (tmp_path / "report").glob("*.png"))
    assert figures == sorted(f for f in set(text.replace(")", "(").split("(")) if f.endswith(".png"))
    assert len(figures) == 6
    for name in figures:
        assert (tmp_path / "report" / name).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_the_replay_command(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--costs", "h20,measured:2x", "--batch", "2,4", "--methods", "1.0,auto,uniform-2"]
    assert main(["bench", "replay", str(run_file), *arguments]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 2 + 2 * 2 * 2
    assert "(1.00)" in lines[2]
    name = Journal.read(run_file).recorded()[0]
    assert main(["bench", "replay", str(run_file), "--fit", f"{name}:1"]) == 0
    assert "forecasts within 10%" in capsys.readouterr().out
    assert main(["bench", "replay", str(run_file), "--fit", "one:9"]) == 2
    assert main(["bench", "replay", str(run_file), "--costs", "a100"]) == 2


def test_commands_name_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "report", str(tmp_path / "none.jsonl"), "--out", str(tmp_path)]) == 2
    assert "none.jsonl" in capsys.readouterr().err
    file = tmp_path / "begun.jsonl"
    file.write_text('{"kind": "run", "format": 1}\n')
    assert main(["bench", "report", str(file), "--out", str(tmp_path)]) == 2
    assert "has no finished round yet" in capsys.readouterr().err
