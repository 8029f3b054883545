from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("gradio")

from hf_dcut.app.command import add_demo
from hf_dcut.app.handlers import Handlers, Visitor
from hf_dcut.app.models import Models
from hf_dcut.app.page import build
from hf_dcut.app.settings import Limits
from hf_dcut.bench.prompts import shipped
from hf_dcut.cli import main

PROMPTS = "a b c a b c a b\none two one two one"


def choices(prompts: str = PROMPTS, budget: str = "fixed", tokens: int = 12) -> tuple[Any, ...]:
    return (prompts, "lookup", budget, 50, tokens, False, 0.7, 0, 1.0, 0)


@pytest.fixture
def handlers(models: Models) -> Handlers:
    return Handlers(models, Limits(open_runs=2))


def last(views: Any) -> dict[str, Any]:
    *_, view = views
    return view


def test_a_run_ends_with_its_files(handlers: Handlers) -> None:
    visitor = Visitor()
    view = last(handlers.run(visitor, *choices()))
    assert "Finished: " in view["status"]
    assert view["trace_file"].interactive
    assert visitor.run is not None
    assert visitor.run.closed
    assert visitor.paused is None


def test_steps_pause_and_running_on_ends(handlers: Handlers) -> None:
    visitor = Visitor()
    assert "Paused after step 1" in last(handlers.step(visitor, *choices()))["status"]
    first = visitor.paused
    assert "Paused after step 2" in last(handlers.step(visitor, *choices()))["status"]
    assert visitor.paused is first
    assert "Step 1" in handlers.look(visitor, 1)["ranking"]
    assert "Finished: " in last(handlers.run(visitor, *choices()))["status"]


def test_stop_ends_a_run_between_two_steps(handlers: Handlers) -> None:
    visitor = Visitor(busy=True)
    views = handlers.run(visitor, *choices(tokens=200))
    next(views)
    assert "Stopping" in handlers.stop(visitor)["status"]
    assert "Stopped after 0 steps" in last(views)["status"]


def test_stop_drops_what_is_paused(handlers: Handlers) -> None:
    visitor = Visitor()
    last(handlers.step(visitor, *choices()))
    assert "Stopped after 1 step:" in handlers.stop(visitor)["status"]
    assert visitor.paused is None


def test_stopped_before_its_turn_it_never_begins(handlers: Handlers) -> None:
    visitor = Visitor(stopping=True)
    assert "Stopped before it began." in last(handlers.run(visitor, *choices()))["status"]
    assert visitor.run is None


def test_a_run_has_its_time(models: Models) -> None:
    handlers = Handlers(models, Limits(seconds=0.0))
    assert "Stopped after 0 seconds" in last(handlers.run(Visitor(), *choices(tokens=100)))["status"]


def test_the_oldest_paused_run_makes_room(handlers: Handlers) -> None:
    visitors = [Visitor() for _ in range(3)]
    for visitor in visitors:
        last(handlers.step(visitor, *choices()))
    assert [visitor.paused is None for visitor in visitors] == [True, False, False]


def test_leaving_closes_the_run(handlers: Handlers) -> None:
    visitor = Visitor()
    last(handlers.step(visitor, *choices()))
    visitor.close()
    assert visitor.run is not None
    assert visitor.run.closed


def test_each_visitor_starts_afresh() -> None:
    first = Visitor()
    assert copy.deepcopy(first) == Visitor()
    assert copy.deepcopy(first) is not first


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (choices("one"), "Prompts: 1 given"),
        (choices(tokens=0), "New tokens 0"),
        (choices("a\n" + "b" * 800), "Prompt 2 has"),
    ],
)
def test_mistakes_are_told_in_place(handlers: Handlers, wrong: tuple[Any, ...], words: str) -> None:
    for work in (handlers.run, handlers.step, handlers.compare):
        view = last(work(Visitor(), *wrong))
        assert words in view["status"]
        assert 'role="alert"' in view["status"]


@pytest.mark.parametrize("name", shipped())
def test_prompts_are_drawn_from_every_set(handlers: Handlers, name: str) -> None:
    assert len(handlers.settings(handlers.draw(name, 5), *choices()[1:]).prompts) == 5


def test_side_by_side_compares(handlers: Handlers) -> None:
    view = last(handlers.compare(Visitor(), *choices()))
    assert "All 2 texts are equal under all 3 methods" in view["race"]


def test_the_page_has_no_public_interface(models_of: Callable[..., Models]) -> None:
    page = build(models_of())
    assert {dependency.api_visibility for dependency in page.fns.values()} == {"private"}


def test_the_command_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    assert add_demo
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    assert "--drafter" in capsys.readouterr().out
