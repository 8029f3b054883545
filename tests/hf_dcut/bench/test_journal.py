"""The run's file: appended, read back, cut short by a kill, of another run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hf_dcut.bench.cell import Key
from hf_dcut.bench.journal import Journal
from hf_dcut.bench.trace import Trace

HEADER = {"plan": {"rounds": 3, "data": ("a",)}, "machine": {"cores": 2}, "version": "1", "commit": None}
KEY = Key("a", 4, 7, 0.0)


def test_a_run_goes_on_where_it_was_killed(tmp_path: Path, make_traces: Callable[..., list[Trace]]) -> None:
    path = tmp_path / "deep" / "run.jsonl"
    journal = Journal.open(path, HEADER)
    journal.write({"kind": "round", "cell": KEY.to_dict(), "round": 0, "methods": {}})
    (trace,) = make_traces(1, tokens=4, depth=2)
    journal.write({"kind": "traces", "data": "a", "requests": [trace.to_dict()]})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "round", "ro')
    again = Journal.open(path, HEADER)
    assert again.lines == journal.lines
    assert path.read_bytes() == whole
    again.write({"kind": "round", "cell": KEY.to_dict(), "round": 1, "methods": {}})
    read = Journal.read(path)
    assert [entry["round"] for entry in read.cell(KEY).rounds] == [0, 1]
    assert [cell.key for cell in read.cells()] == [KEY]
    assert read.recorded() == ["a"]
    assert read.traces("a")[0].tokens == 4
    assert read.header["version"] == "1"


def test_costs_of_all_cells_make_one_surface(tmp_path: Path) -> None:
    journal = Journal.open(None, HEADER)
    assert journal.surface(7) is None
    for batch, slow in ((2, 1.0), (4, 3.0)):
        key = Key("a", batch, 7, 0.0)
        seconds = {"2": {"0": slow, "16": 2 * slow}, str(batch): {"0": slow, str(8 * batch): 2 * slow}}
        journal.write({"kind": "costs", "cell": key.to_dict(), "draft_tokens": 7, "seconds": seconds})
    assert journal.has_costs(Key("a", 2, 7, 0.0))
    assert not journal.has_costs(Key("a", 3, 7, 0.0))
    surface = journal.surface(7)
    assert surface is not None
    assert surface.rows == {2: {0: 2.0, 16: 4.0}, 4: {0: 3.0, 32: 6.0}}


@pytest.mark.parametrize(
    ("part", "other", "message"),
    [
        ("plan", {"rounds": 4, "data": ("a",)}, "holds a run with rounds=3, not 4: name another file"),
        ("machine", {"cores": 8}, "holds a run with cores=2, not 8"),
    ],
)
def test_another_run_is_not_gone_on_with(part: str, other: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    Journal.open(path, HEADER)
    with pytest.raises(ValueError, match=message):
        Journal.open(path, {**HEADER, part: other})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a run of this version's hf-dcut bench"),
        ('{"kind": "run", "format": 0}\n', "is not a run of this version's"),
        ('{"kind": "run", "format": 1}\n{oops}\n', "line 2 is damaged"),
        ('{"kind": "run", "format": 1}\n[1]\n', "line 2 is not of a run"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Journal.read(path)
