"""Forecasts meet measurements that were made by the same law, at other prompts and batch sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hf_dcut.bench.cell import Key
from hf_dcut.bench.forecast import check, check_table, forecast, forecast_table
from hf_dcut.bench.journal import Journal
from hf_dcut.bench.simulator import replay
from hf_dcut.bench.surface import Surface
from hf_dcut.bench.trace import Trace
from hf_dcut.cost_table import CostTable

DEPTH = 7
METHODS = ("plain", "1.0", "0.5", "uniform-2")
# How much slower the machine is than its costs say, and the seconds of a row, which prompts take too.
SCALE, ROW = 1.2, 0.0005


def law(batch: int) -> dict[int, float]:
    """Returns steps that are linear in B and T, which an interpolation meets exactly."""
    totals = [batch * places for places in (1, 2, 4, 6, 8)]
    return {0: 0.02 + 0.001 * batch, **{t: 0.025 + 0.001 * batch + ROW * t for t in totals}}


def journal_of(traces: dict[str, list[Trace]], noise: float = 0.0) -> Journal:
    """Returns a run whose measurements are a replay's, slower by a factor, with prompts that take time."""
    plan = {"prompts": 12, "per_slot": 1}
    journal = Journal.open(None, {"plan": plan, "machine": {}})
    for data, requests in traces.items():
        journal.write({"kind": "traces", "data": data, "requests": [trace.to_dict() for trace in requests]})
        for batch in (2, 4, 8):
            key = Key(data, batch, DEPTH, 0.0)
            costs = Surface({b: law(b) for b in (2, 4, 8)}, DEPTH)
            seconds = {str(b): {str(t): s for t, s in law(b).items()} for b in (2, 4, 8)}
            journal.write({"kind": "costs", "cell": key.to_dict(), "draft_tokens": DEPTH, "seconds": seconds})
            methods: dict[str, Any] = {}
            for method in METHODS:
                # As the run's blocks are: all twelve at B = 8, in blocks of four at B = 2 and 4.
                size = 12 if batch == 8 else 4
                blocks = [journal.traces(data)[i : i + size] for i in range(0, 12, size)]
                runs = [replay(block, batch, method, costs) for block in blocks]
                prompts = sum(trace.prompt_tokens for trace in requests)
                taken = SCALE * (sum(run.seconds for run in runs) + ROW * prompts)
                tokens = sum(run.stats.new_tokens for run in runs)
                methods[method] = {"seconds": taken * (1 + noise), "tokens": tokens, "mismatches": 0}
            journal.write({"kind": "round", "cell": key.to_dict(), "round": 0, "prompts": 12, "methods": methods})
    return journal


@pytest.fixture(scope="module")
def journal(make_traces: Callable[..., list[Trace]]) -> Journal:
    sets = {"easy": make_traces(12, tokens=24, depth=DEPTH, moods=(0.9, 0.7), prompt_tokens=30)}
    sets["hard"] = make_traces(12, tokens=24, depth=DEPTH, moods=(0.6, 0.2), seed=1, prompt_tokens=10)
    return journal_of(sets)


def test_other_prompts_and_another_batch_size_are_met(journal: Journal) -> None:
    checks = check(journal, Key("easy", 4, DEPTH, 0.0))
    assert {(c.key.data, c.key.batch) for c in checks} == {("hard", 2), ("hard", 8)}
    assert {c.method for c in checks} == set(METHODS)
    assert max(abs(c.error) for c in checks) < 1e-6
    table = check_table(journal, "easy:4")
    assert "fitted on easy:4, tokens/s: 8 of 8 forecasts within 10%, median error 0.0%, largest 0.0%" in table
    assert "over plain: 6 of 6 forecasts within 10%, median error 0.0%, largest 0.0%" in table


def test_a_forecast_that_is_off_is_told(make_traces: Callable[..., list[Trace]]) -> None:
    traces = make_traces(12, tokens=12, depth=DEPTH, prompt_tokens=10)
    journal = journal_of({"a": traces, "b": traces})
    for line in journal.lines:
        if line["kind"] == "round" and line["cell"] == Key("b", 8, DEPTH, 0.0).to_dict():
            for values in line["methods"].values():
                values["seconds"] *= 1.5
    text = check_table(journal, "a:4")
    assert "tokens/s: 4 of 8 forecasts within 10%" in text
    assert "largest 50.0%" in text
    assert "over plain: 6 of 6 forecasts within 10%" in text, "a slower machine is no other gain"


def test_a_machine_known_to_be_slower_is_no_error(make_traces: Callable[..., list[Trace]]) -> None:
    traces = make_traces(12, tokens=12, depth=DEPTH, prompt_tokens=10)
    journal = journal_of({"a": traces, "b": traces})
    for line in journal.lines:
        if line["kind"] == "round":
            slow = line["cell"]["data"] == "b"
            for values in line["methods"].values():
                values["pulse"] = 0.3 if slow else 0.2
                values["seconds"] *= 1.5 if slow else 1.0
    assert max(abs(c.error) for c in check(journal, Key("a", 4, DEPTH, 0.0))) < 1e-6


def test_trees_that_nobody_recorded_are_refused(journal: Journal) -> None:
    with pytest.raises(ValueError, match="method 'tree-auto': None has no trees of easy"):
        forecast_table(journal, ("h20",), (8,), ("1.0", "tree-auto"))


@pytest.mark.parametrize("fit", ["easy:3", "easy", "none:4"])
def test_the_cell_to_fit_on_must_be_there(fit: str, journal: Journal) -> None:
    with pytest.raises(ValueError, match="the run has the cells easy:2, easy:4"):
        check_table(journal, fit)


def test_one_data_set_is_not_enough(make_traces: Callable[..., list[Trace]]) -> None:
    journal = journal_of({"a": make_traces(12, tokens=12, depth=DEPTH)})
    with pytest.raises(ValueError, match="two recorded data sets at two batch sizes"):
        check_table(journal, "a:4")


def test_forecasts_fill_the_batch(make_traces: Callable[..., list[Trace]]) -> None:
    traces = make_traces(3, tokens=12, depth=DEPTH)
    costs = Surface({8: law(8)}, DEPTH)
    assert forecast(traces, costs, 8, "plain") > 8 / (law(8)[0] * 1.2)
    with pytest.raises(ValueError, match="has no recorded drafts: run hf-dcut bench with --record"):
        forecast_table(Journal.open(None, {"plan": {}, "machine": {}}), ("h20",), (8,))


def test_the_engines_table_stays_out_of_it() -> None:
    assert CostTable.from_rows({8: law(8)}, DEPTH).drafted(2, 16) == law(8)[64]
