"""Costs between measured points, what observed steps do to them, and the file they are kept in."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_dcut.cost_table import _FORMAT, CostTable, open_table
from hf_dcut.machine import machine_fingerprint
from hf_dcut.timing import REPEATS, WARM_UP, at_one_pace, rising, spread

D = 3
FINGERPRINT = {"device": "cpu", "target": "tiny"}
ROWS = {1: {0: 1.0, 1: 1.2, 2: 1.4, 4: 2.0}, 4: {0: 2.0, 4: 3.0, 8: 4.0, 16: 8.0}}


@pytest.fixture
def table() -> CostTable:
    return CostTable.from_rows(ROWS, D)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tables" / "costs.json"


def measured(path: Path | None = None, fingerprint: dict[str, str] | None = None) -> CostTable:
    """Returns a table that measured B = 2 at T = 2 and 8, and the plain step, saved to its file."""
    table = open_table(path or "off", D, fingerprint or FINGERPRINT)
    table.measure(table.missing([2], lambda b: [2, 8], kv_length=64), 64, lambda requests, total: None)
    table.save()
    return table


def test_measured_points_are_given_back(table: CostTable) -> None:
    for requests, row in ROWS.items():
        assert table.plain(requests) == row[0]
        assert all(table.drafted(requests, total) == seconds for total, seconds in row.items() if total)


def test_between_points_the_cost_is_on_the_line(table: CostTable) -> None:
    assert table.drafted(4, 6) == pytest.approx(3.5)
    assert table.drafted(4, 14) == pytest.approx(7.0)
    assert table.drafted(1, 3) == pytest.approx(1.7)


def test_beyond_the_ends_the_end_is_taken(table: CostTable) -> None:
    assert (table.drafted(4, 1), table.drafted(4, 99)) == (3.0, 8.0)


def test_the_nearest_batch_stands_in_at_equal_share_of_positions(table: CostTable) -> None:
    assert table.drafted(3, 6) == table.drafted(4, 8)
    assert table.drafted(2, 8) == table.drafted(1, 4)
    assert table.drafted(64, 64) == table.drafted(4, 4)
    assert table.plain(64) == 2.0


def test_between_two_equally_near_batches_the_larger_stands_in() -> None:
    assert CostTable.from_rows({2: {0: 1.0}, 4: {0: 5.0}}, D).plain(3) == 5.0


def test_a_single_point_is_taken_for_all() -> None:
    single = CostTable.from_rows({1: {4: 2.0}}, D)
    assert single.drafted(1, 1) == single.drafted(1, 4) == single.drafted(7, 9) == 2.0


def test_the_batch_size_counts_before_the_kv_length() -> None:
    """A short call of two requests left its rows in the file; eight long ones do not go by them."""
    table = CostTable(3)
    table.seconds = {16: {1: {0: 1.0, 4: 2.0}, 2: {0: 1.5, 8: 3.0}}, 128: {2: {0: 4.0, 8: 6.0}, 8: {0: 10.0, 32: 20.0}}}
    assert (table.plain(8, 16), table.drafted(8, 32, 16)) == (10.0, 20.0)
    assert table.curve(8, 0) == ([32.0], [20.0])
    assert (table.plain(2, 16), table.plain(2, 128)) == (1.5, 4.0)
    assert table.plain(1, 128) == 1.0
    assert table.plain(9, 16) == 10.0


def test_the_nearest_kv_length_counts() -> None:
    table = open_table("off", D, {})
    for kv_length, pause in ((128, 1.0), (1024, 7.0)):
        table.seconds[kv_length] = {1: {0: pause, 4: pause}}
    assert [table.plain(1, n) for n in (0, 500, 600, 9999)] == [1.0, 1.0, 7.0, 7.0]


@pytest.mark.parametrize(
    ("rows", "ask"),
    [
        ({}, lambda table: table.plain(1)),
        ({}, lambda table: table.drafted(1, 1)),
        ({1: {4: 1.0}}, lambda table: table.plain(1)),
        ({1: {0: 1.0}}, lambda table: table.drafted(1, 1)),
    ],
)
def test_what_was_never_measured_is_named(rows: dict[int, dict[int, float]], ask: Callable[[CostTable], float]) -> None:
    with pytest.raises(ValueError, match=r"measure it with hf_dcut\.warmup"):
        ask(CostTable.from_rows(rows, D))


def test_observed_steps_move_an_entry_slowly(table: CostTable) -> None:
    table.observe(4, 8, 4.4)
    assert table.drafted(4, 8) == pytest.approx(4.02), "a twentieth of the way"
    for _ in range(200):
        table.observe(4, 8, 5.0)
        table.observe(4, 0, 2.0)
    assert table.drafted(4, 8) / table.plain(4) == pytest.approx(2.5, rel=0.02)
    assert (table.drafted(4, 4), table.drafted(4, 16), table.drafted(1, 2)) == (3.0, 8.0, 1.4)


def test_a_plain_step_moves_the_plain_entry(table: CostTable) -> None:
    table.observe(4, 0, 1.8)
    assert table.plain(4) == pytest.approx(1.99)
    assert table.drafted(4, 4) == 3.0


@pytest.mark.parametrize("slower", [0.6, 1.5, 3.0])
def test_a_slower_machine_is_no_reason_to_draft_less(table: CostTable, slower: float) -> None:
    """Only drafted steps are seen while drafting goes on; their costs must not rise against the plain step's."""
    before = table.drafted(4, 8) / table.plain(4)
    for _ in range(100):
        table.observe(4, 8, 4.0 * slower)
    assert table.pace == pytest.approx(slower**0.8, rel=0.1), "most of it"
    assert table.drafted(4, 8) / table.plain(4) == pytest.approx(before * slower**0.2, rel=0.1)


@pytest.mark.parametrize(("seconds", "factor"), [(4000.0, 1.05), (1e-6, 0.975)])
def test_a_hiccup_moves_an_entry_no_further_than_a_factor_of_two_would(
    table: CostTable, seconds: float, factor: float
) -> None:
    table.observe(4, 8, seconds)
    assert table.drafted(4, 8) == pytest.approx(4.0 * factor)


def test_a_neighbours_step_is_scaled_to_the_entry_it_was_predicted_from(table: CostTable) -> None:
    table.observe(3, 6, 4.4)
    assert table.drafted(4, 8) == pytest.approx(4.02)


def test_missing_names_what_is_not_known() -> None:
    table = open_table("off", D, {})
    wanted: Callable[[int], list[int]] = lambda b: [b, 2 * b]  # noqa: E731
    assert table.missing([1, 2], wanted, 64) == {1: [0, 1, 2], 2: [0, 2, 4]}
    table.measure({1: [0, 2], 2: [0, 2, 4]}, 64, lambda requests, total: None)
    assert table.missing([1, 2, 4], wanted, 64) == {1: [0, 1, 2], 4: [0, 4, 8]}, "rows that lack something, whole"
    assert table.missing([1], wanted, 128) == {1: [0, 1, 2]}


def test_measuring_keeps_the_median_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ran = [0.0], []
    first = iter([9.0] * WARM_UP + [1.0, 7.0, 2.0, 3.0, 2.5])

    def step(requests: int, total: int) -> None:
        ran.append((requests, total))
        clock[0] += next(first) if total else 0.5

    monkeypatch.setattr("hf_dcut.cost_table.time.perf_counter", lambda: clock[0])
    table = open_table("off", D, {})
    seconds = table.measure({2: [0, 8]}, 64, step)
    assert (table.drafted(2, 8), table.plain(2)) == (2.5, 0.5)
    assert ran == [(2, 0), (2, 8)] * (WARM_UP + REPEATS), "interleaved"
    assert seconds == clock[0]


def test_batch_sizes_are_measured_in_turns_too() -> None:
    """A table whose rows are of different moments of a machine would compare those."""
    ran: list[tuple[int, int]] = []
    open_table("off", D, {}).measure({1: [0, 4], 2: [0]}, 64, lambda *step: ran.append(step))
    assert ran[:6] == [(1, 0), (1, 4), (2, 0)] * 2


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1.0, 2.0, 2.0, 3.0], [1.0, 2.0, 2.0, 3.0]),
        ([1.0, 3.0, 2.0, 4.0], [1.0, 2.5, 2.5, 4.0]),
        ([1.0, 4.0, 3.0, 2.0], [1.0, 3.0, 3.0, 3.0]),
        ([2.0, 1.0, 1.0, 5.0], [4 / 3, 4 / 3, 4 / 3, 5.0]),  # not even a plain step takes longer than a drafted one
        ([3.0, 1.0, 4.0, 2.0], [2.0, 2.0, 3.0, 3.0]),
    ],
)
def test_no_step_costs_less_than_one_of_fewer_tokens(row: list[float], expected: list[float]) -> None:
    totals = [0, 4, 8, 16]
    assert rising(dict(zip(totals, row, strict=True))) == pytest.approx(dict(zip(totals, expected, strict=True)))


def test_measured_rows_are_evened_out() -> None:
    clock = [0.0]

    def step(requests: int, total: int) -> None:
        clock[0] += {0: 1.0, 4: 3.0, 8: 2.0}[total]

    table = open_table("off", D, {})
    table.measure({4: [0, 4, 8]}, 64, step, lambda: clock[0])
    assert table.seconds == {64: {4: {0: 1.0, 4: 2.5, 8: 2.5}}}


# Seconds of an entry's repeats.
STILL, BUSY = [1.0, 1.1, 1.0, 0.9, 1.0], [1.0, 3.0, 1.0, 5.0, 2.0]


class Machine:
    """A clock, and a step that moves it as the next of its repeats says.

    Args:
        tries: repeats of each try at T = 8, warm-up left out; the last goes on for ever. Other steps take 0.5.
    """

    def __init__(self, *tries: list[float]):
        self.now, self.tries, self.steps = 0.0, tries, 0

    def step(self, requests: int, total: int) -> None:
        self.now += 0.5
        if total == 8:
            number, repeat = divmod(self.steps, WARM_UP + REPEATS)
            values = self.tries[min(number, len(self.tries) - 1)]
            self.now += values[repeat - WARM_UP] - 0.5 if repeat >= WARM_UP else 8.5
            self.steps += 1


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> Callable[[CostTable, Machine], None]:
    """Measures on a machine with the real limit of steadiness."""

    def measure(table: CostTable, machine: Machine) -> None:
        monkeypatch.setattr("hf_dcut.timing.STEADY", 0.25)
        monkeypatch.setattr("hf_dcut.cost_table.time.perf_counter", lambda: machine.now)
        table.measure(table.missing([2], lambda b: [8], 64), 64, machine.step)

    return measure


@pytest.mark.parametrize(("tries", "expected"), [([STILL], 1), ([BUSY, STILL], 2), ([BUSY, BUSY, STILL], 3)])
def test_rows_that_vary_are_timed_again(
    watchful: Callable[[CostTable, Machine], None],
    caplog: pytest.LogCaptureFixture,
    tries: list[list[float]],
    expected: int,
) -> None:
    table, machine = open_table("off", D, {}), Machine(*tries)
    watchful(table, machine)
    assert machine.steps == expected * (WARM_UP + REPEATS)
    assert (table.drafted(2, 8), table.plain(2), table.unsteady) == (1.0, 0.5, {})
    assert not caplog.messages


def test_what_stays_unsteady_is_told_and_measured_again_by_the_next_process(
    watchful: Callable[[CostTable, Machine], None],
    path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = open_table(path, D, FINGERPRINT)
    watchful(table, Machine(BUSY))
    table.save()
    (line,) = caplog.messages
    assert "step costs of B = 2 varied" in line
    assert open_table(path, D, FINGERPRINT).missing([2], lambda b: [8], 64) == {}, "not again by this process"
    monkeypatch.setattr("hf_dcut.cost_table.os.getpid", lambda: -1)
    again = open_table(path, D, FINGERPRINT)
    assert again.drafted(2, 8, 64) == 2.0
    assert again.missing([2], lambda b: [8], 64) == {2: [0, 8]}
    watchful(again, Machine(STILL))
    again.save()
    monkeypatch.undo()
    assert open_table(path, D, FINGERPRINT).missing([2], lambda b: [8], 64) == {}


def test_a_slow_turn_counts_for_no_step_of_it() -> None:
    """The pace of a turn, here 1, 2, 1, 1.5 and 1, is taken out of it; one step that was held up is not a pace."""
    row = {0: [1.0, 2.0, 1.0, 1.5, 1.0], 8: [2.0, 4.0, 2.0, 3.0, 9.0], 16: [3.0, 6.0, 3.0, 4.5, 3.0]}
    assert at_one_pace(row) == {0: [1.0] * 5, 8: [2.0, 2.0, 2.0, 2.0, 9.0], 16: [3.0] * 5}


def test_ratios_within_a_row_hold_where_the_machine_changes_its_speed() -> None:
    """Half of the turns are on a machine half as fast: nothing varies but its pace, so nothing is timed again."""
    clock, ran = [0.0], []

    def step(requests: int, total: int) -> None:
        slow = 2.0 if len(ran) // 3 >= WARM_UP + 3 else 1.0
        clock[0] += slow * {0: 1.0, 4: 2.0, 8: 4.0}[total]
        ran.append(total)

    table = open_table("off", D, {})
    table.measure({4: [0, 4, 8]}, 64, step, lambda: clock[0])
    assert table.seconds == {64: {4: {0: 1.0, 4: 2.0, 8: 4.0}}}
    assert (table.unsteady, len(ran)) == ({}, 3 * (WARM_UP + REPEATS))


def test_one_hiccup_among_the_repeats_does_not_matter() -> None:
    assert spread([1.0, 1.0, 1.1, 9.0, 1.0]) < 0.25
    assert spread([1.0, 1.0, 1.1, 9.0, 9.0]) > 0.25


def test_a_saved_table_comes_back(path: Path) -> None:
    table = measured(path)
    again = open_table(path, D, FINGERPRINT)
    assert again.drafted(2, 8, 64) == table.drafted(2, 8, 64)
    assert again.missing([2], lambda b: [2, 8], kv_length=64) == {}


def test_the_file_is_json_with_the_fingerprint(path: Path) -> None:
    measured(path)
    content = json.loads(path.read_text())
    assert content["fingerprint"] == {**FINGERPRINT, "draft_tokens": D}
    assert set(content["seconds"]["64"]["2"]) == {"0", "2", "8"}


def test_writing_is_all_or_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table = measured(path)
    before = path.read_text()

    def fail(source: object, destination: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("hf_dcut.cost_table.os.replace", fail)
    table.observe(2, 8, 9.0, 64)
    with caplog.at_level(logging.WARNING, "hf_dcut"):
        table.save()
    (line,) = caplog.messages
    assert str(path) in line
    assert "disk full" in line
    assert path.read_text() == before
    assert os.listdir(path.parent) == [path.name], "nothing half-written is left behind"


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, "hf_dcut"):
        table = measured(tmp_path / "file" / "costs.json")
    assert "cannot be written" in caplog.text
    assert table.drafted(2, 8, 64) > 0, "the call goes on with what was measured"


def test_a_folder_in_the_files_place_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hf_dcut"):
        open_table(tmp_path, D, FINGERPRINT)
    assert "cannot be read" in caplog.text


def damaged() -> dict[str, str]:
    entry = {"format": _FORMAT, "fingerprint": {**FINGERPRINT, "draft_tokens": D}, "draft_tokens": D}
    return {
        "empty": "",
        "cut off": '{"format": 1, "finge',
        "no object": "[1, 2]",
        "a word": '"costs"',
        "no seconds": json.dumps(entry),
        "a negative time": json.dumps({**entry, "seconds": {"64": {"2": {"8": -1.0}}}}),
        "an infinite time": json.dumps({**entry, "seconds": {"64": {"2": {"8": float("inf")}}}}),
        "no number": json.dumps({**entry, "seconds": {"64": {"2": {"8": "fast"}}}}),
        "no step": json.dumps({**entry, "seconds": {"64": {}}}),
        "no batch size": json.dumps({**entry, "seconds": {"64": {"two": {"8": 1.0}}}}),
        "a list for a row": json.dumps({**entry, "seconds": {"64": {"2": [1.0]}}}),
    }


@pytest.mark.parametrize("fault", damaged())
def test_a_damaged_file_is_told_and_measured_anew(path: Path, caplog: pytest.LogCaptureFixture, fault: str) -> None:
    path.parent.mkdir()
    path.write_text(damaged()[fault])
    with caplog.at_level(logging.WARNING, "hf_dcut"):
        table = open_table(path, D, FINGERPRINT)
    (line,) = caplog.messages
    assert str(path) in line
    assert "damaged" in line
    assert table.missing([2], lambda b: [8], 64) == {2: [0, 8]}
    measured(path)
    assert open_table(path, D, FINGERPRINT).missing([2], lambda b: [8], 64) == {}


def test_bytes_that_are_no_text_are_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    path.write_bytes(b"\xff\xfe\x00\x80")
    with caplog.at_level(logging.WARNING, "hf_dcut"):
        open_table(path, D, FINGERPRINT)
    assert "damaged" in caplog.text


def test_another_machines_table_is_told_and_measured_anew(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    measured(path)
    with caplog.at_level(logging.WARNING, "hf_dcut"):
        table = open_table(path, D, {**FINGERPRINT, "device": "cuda"})
    (line,) = caplog.messages
    assert str(path) in line
    assert "another machine, model or version" in line
    assert table.missing([2], lambda b: [8], 64) == {2: [0, 8]}


def test_another_depths_table_is_told_and_measured_anew(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    measured(path)
    with caplog.at_level(logging.WARNING, "hf_dcut"):
        table = open_table(path, D + 1, FINGERPRINT)
    assert "measuring anew" in caplog.text
    assert table.missing([2], lambda b: [8], 64) == {2: [0, 8]}


def test_the_automatic_place_follows_the_fingerprint() -> None:
    here, again, there = (open_table("auto", D, {"device": name}) for name in ("a", "a", "b"))
    assert here.path is not None
    assert here.path == again.path != there.path
    assert here.path.is_relative_to(os.environ["HF_HOME"])


def test_off_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert measured().path is None
    assert list(tmp_path.iterdir()) == []


def test_a_table_is_taken_as_it_is(table: CostTable) -> None:
    assert open_table(table, D, FINGERPRINT) is table


def test_a_table_for_other_draft_tokens_is_refused(table: CostTable) -> None:
    with pytest.raises(ValueError, match="measured for 3 draft tokens and the drafter makes 7"):
        open_table(table, 7, FINGERPRINT)


def test_printing_shows_shares_and_milliseconds(table: CostTable) -> None:
    text = str(table)
    assert "D = 3" in text
    assert "B = 4   plain 2000.00 ms   25% 3000.00 ms   50% 4000.00 ms   100% 8000.00 ms" in text


def test_the_machines_fingerprint_is_json() -> None:
    values = machine_fingerprint(torch.device("cpu"))
    assert json.loads(json.dumps(values)) == values
    assert {"device", "threads", "torch", "transformers"} <= set(values)


def test_the_curve_is_what_lies_between_its_points() -> None:
    table = CostTable.from_rows({4: {0: 1.0, 4: 2.0, 12: 3.0, 16: 5.0}, 8: {0: 1.0, 8: 7.0}}, draft_tokens=3)
    assert table.curve(4) == ([4, 12, 16], [2.0, 3.0, 5.0])
    assert table.curve(3) == ([3, 9, 12], [2.0, 3.0, 5.0]), "at equal share of positions"
    assert table.curve(8) == ([8], [7.0])
    assert [table.drafted(4, t) for t in (4, 8, 12, 14, 16, 20)] == [2.0, 2.5, 3.0, 4.0, 5.0, 5.0]
