from __future__ import annotations

from collections.abc import Callable

import pytest

from hf_dcut.app.models import Models
from hf_dcut.app.race import Race
from hf_dcut.app.settings import Limits, Settings
from hf_dcut.app.trace import Answer, Piece, Trace, disagreement


def answer(*tokens: int) -> Answer:
    return Answer("", [Piece(token, "", False) for token in tokens])


def trace_of(*tokens: int) -> Trace:
    return Trace("", 0, len(tokens), [answer(*tokens)])


@pytest.mark.parametrize(
    ("left", "right", "place"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1,), (1, 2), 1), ((), (1,), 0), ((), (), None)],
)
def test_disagreement(left: tuple[int, ...], right: tuple[int, ...], place: int | None) -> None:
    assert disagreement(answer(*left), answer(*right)) == place


def test_three_methods_agree(models: Models, settings: Callable[..., Settings]) -> None:
    race = Race(models, settings(drafter="random", budget=0.5), Limits())
    seen = {id(trace) for trace in race.steps()}
    assert len(seen) == len(race.traces) == 3
    assert race.done
    assert race.differences() == [None] * 4
    cut, everything, plain = race.traces
    assert [trace.method for trace in race.traces] == ["D-cut", "Verify everything", "Plain"]
    assert everything.cut_share == 0 < cut.cut_share
    assert plain.drafted == 0
    assert len(everything.steps) <= len(cut.steps) <= len(plain.steps)


def test_differences_are_found(models: Models, settings: Callable[..., Settings]) -> None:
    race = Race(models, settings(), Limits())
    race.traces = [trace_of(1, 2, 3), trace_of(1, 2, 4), trace_of(1, 5, 3)]
    assert race.differences() == [1]


def test_leaving_a_race_closes_its_run(models: Models, settings: Callable[..., Settings]) -> None:
    race = Race(models, settings(), Limits())
    steps = race.steps()
    next(steps)
    next(steps)
    steps.close()
    assert race.traces[0].stopped
    assert not race.done
