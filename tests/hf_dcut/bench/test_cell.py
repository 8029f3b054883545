"""What the rounds of a cell say: medians, ratios with intervals, alarms, the table and the marks."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from hf_dcut.bench.cell import Cell, Key, interval
from hf_dcut.bench.claims import claims_table, verdict
from hf_dcut.bench.table import cell_table
from hf_dcut.stats import STAGES

KEY = Key("gsm8k", 8, 3, 0.0)


def stats(
    kept: int = 40, accepted: int = 10, rows: int = 20, histogram: dict[str, int] | None = None
) -> dict[str, Any]:
    return {
        "rows": rows,
        "kept": kept,
        "accepted_tokens": accepted,
        "committed_tokens": accepted + rows,
        "steps": 8,
        "drafted_steps": 4,
        "histogram": histogram or {"0": 12, "1": 6, "2": 2},
        "stage_seconds": dict.fromkeys(STAGES, 0.5),
    }


def entry(seconds: float, tokens: int = 100, mismatches: int = 0, **extra: Any) -> dict[str, Any]:
    agreed = {"equal": 4 - mismatches, "ties": 0, "mismatches": mismatches, "margin": 0.0}
    return {"seconds": seconds, "tokens": tokens, "first_token": 0.25, "peak_bytes": 1 << 30, **agreed, **extra}


def cell(seconds: dict[str, list[float]], **extra: dict[str, Any]) -> Cell:
    count = len(next(iter(seconds.values())))
    rounds = [
        {"prompts": 4, "methods": {m: entry(s[i], **extra.get(m, {})) for m, s in seconds.items()}}
        for i in range(count)
    ]
    return Cell(KEY, rounds)


def test_medians_and_ratios() -> None:
    measured = cell(
        {"generate": [1.0, 2.0, 4.0], "plain": [1.0, 1.0, 2.0], "auto": [0.5, 0.8, 1.0]}, auto={"stats": stats()}
    )
    assert measured.speed("generate") == 50.0
    ratio = measured.ratio("auto", "generate")
    assert ratio is not None
    assert ratio.value == 2.5  # of 2, 2.5 and 4
    assert (ratio.low, ratio.high) == (2.0, 4.0)
    assert str(ratio) == "2.50 [2.00, 4.00]"
    assert measured.ratio("auto", "0.5") is None
    assert measured.mean_accepted("auto") == 1.5
    assert measured.kept_share("auto") == 60 / 80
    assert measured.drafted_share("auto") == 0.5
    assert measured.mean_accepted("plain") is None
    assert measured.acceptance("auto") == [0.4, 0.1, 0.0]
    assert measured.step_seconds("auto")["verify"] == 0.5 * 3 / 24
    assert measured.median("auto", "first_token") == 0.25
    assert measured.prompts == 12
    assert not measured.alarms()


def test_intervals_narrow_with_rounds_and_hold_the_median() -> None:
    assert interval([2.0, 3.0]).low is None
    spread = [1 + 0.01 * i for i in range(21)]
    few, many = interval(spread[::10]), interval(spread)
    for found in (few, many):
        assert found.low is not None
        assert found.high is not None
        assert found.low <= found.value <= found.high
    assert (few.low, few.high) == (1.0, 1.2)
    assert many.high - many.low < few.high - few.low
    assert many.value == statistics.median(spread)
    assert interval(spread) == many


def test_a_method_with_mismatches_has_no_speed() -> None:
    measured = cell({"generate": [1.0], "auto": [0.1]}, auto={"mismatches": 1, "stats": stats()})
    assert measured.speed("auto") is None
    assert measured.ratio("auto", "generate") is None
    assert measured.alarms() == ["auto: 1 answers are not the target's, so it has no speed"]
    line = cell_table(measured).splitlines()[3]
    assert line.split("|")[2:4] == [" -        ", " -           "]
    assert "3/4, 1 MISMATCHES" in line


@pytest.mark.parametrize(
    ("numbers", "alarm"),
    [
        (stats(kept=40, accepted=0), "mean accepted tokens are exactly 1.00"),
        (stats(kept=40, accepted=40), "every single draft was accepted"),
        (stats(kept=5, accepted=5), None),
        (stats(kept=40, accepted=39), None),
    ],
)
def test_alarms(numbers: dict[str, Any], alarm: str | None) -> None:
    found = cell({"1.0": [1.0]}, **{"1.0": {"stats": numbers}}).alarms()
    assert [alarm in text for text in found] == [True] if alarm else not found


def test_the_table_has_an_interval_when_there_are_rounds_for_it() -> None:
    seconds = {"generate": [1.0, 1.0, 1.0], "plain": [1.0, 1.0, 1.0], "auto": [0.5, 0.5, 0.4]}
    measured = cell(seconds, auto={"stats": stats()})
    table = cell_table(measured).splitlines()
    assert table[0].split("|")[1].strip() == "method"
    assert table[0].split("|")[-2].strip() == "vs plain [95 %]"
    assert table[4].split("|")[-2].strip() == "2.00 [2.00, 2.50]"
    assert "vs plain" not in cell_table(cell({m: s[:2] for m, s in seconds.items()}))
    alone = cell_table(cell({"plain": [1.0], "auto": [0.5]}, auto={"stats": stats()})).splitlines()
    assert [line.split("|")[-2].strip() for line in alone[2:]] == ["1.00", "2.00"]


def test_marks() -> None:
    assert verdict(interval([1.0, 1.0, 1.0]), 0.97) == "1.00 [1.00, 1.00], yes"
    assert verdict(interval([0.9, 1.0, 1.1]), 0.97) == "1.00 [0.90, 1.10], yes?"
    assert verdict(interval([0.9, 0.9, 0.9]), 0.97) == "0.90 [0.90, 0.90], no"
    assert verdict(interval([1.0]), 0.97) == "1.00, yes?"
    assert verdict(None, 0.97) == "-"
    seconds = {"plain": [1.0] * 3, "1.0": [1.2] * 3, "0.5": [0.9] * 3, "0.25": [1.0] * 3, "auto": [0.95] * 3}
    trees = {"tree-0.5": [0.8] * 3, "tree-auto": [0.8] * 3}
    both = {method: {"stats": stats()} for method in ("auto", "tree-auto")}
    lines = claims_table([cell(seconds | trees, **both)]).splitlines()[2:]
    assert [part.strip() for part in lines[1].split("|")[2:5]] == [
        "tree-auto",
        "tree-0.5: 1.00 [1.00, 1.00], yes",
        "1.25 [1.25, 1.25], yes",
    ]
    assert [part.strip() for part in lines[0].split("|")[1:-1]] == [
        "gsm8k, B = 8, D = 3",
        "auto",
        "0.5: 0.95 [0.95, 0.95], no",
        "1.05 [1.05, 1.05], yes",
        "1.26 [1.26, 1.26], yes",
        "50%",
    ]
    assert claims_table([cell({"plain": [1.0]})]) == "No cell has the method auto."
