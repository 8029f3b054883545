"""Modules changed for the time of a call: once, however many calls there are, and never those of somebody else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from torch import nn

from hf_dcut.swapping import Swap

Marking = Callable[[list[nn.Module]], AbstractContextManager[None]]


@pytest.fixture
def marking() -> Marking:
    def mark(module: nn.Module) -> None:
        module.mark = "ours"

    def unmark(module: nn.Module) -> None:
        del module.mark

    return Swap(lambda module: not hasattr(module, "mark"), mark, unmark)


def test_a_module_is_changed_inside_and_as_before_outside(marking: Marking) -> None:
    module = nn.Identity()
    before = dict(vars(module))
    with marking([module]):
        assert module.mark == "ours"
    assert vars(module) == before


def test_the_last_of_several_calls_changes_it_back(marking: Marking) -> None:
    module = nn.Identity()
    first, second = marking([module]), marking([module])
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert module.mark == "ours"
    second.__exit__(None, None, None)
    assert not hasattr(module, "mark")


def test_what_somebody_else_changed_is_left_alone(marking: Marking) -> None:
    module = nn.Identity()
    module.mark = "theirs"
    with marking([module]):
        assert module.mark == "theirs"
    assert module.mark == "theirs"


def test_an_error_inside_leaves_nothing_behind(marking: Marking) -> None:
    module = nn.Identity()
    with pytest.raises(KeyError), marking([module]):
        raise KeyError
    assert not hasattr(module, "mark")
