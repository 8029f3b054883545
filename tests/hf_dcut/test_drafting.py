"""A drafter that fails costs speed, never a request: it is asked no more, and that is said once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from hf_dcut.config import DCutConfig
from hf_dcut.drafters.base import BoundDrafter
from hf_dcut.drafting import Drafting, joined
from hf_dcut.ranks import Ranks
from hf_dcut.requests import Request
from hf_dcut.types import Batch, Committed, Drafts

D = 3
NOTHING = Committed(*[torch.zeros(0, dtype=torch.int64)] * 4, None, (), (), (), ())


class Fragile(BoundDrafter):
    """Makes five drafts a request, and raises where it is told to.

    Args:
        where: the method that fails.
        error: what it raises.
    """

    def __init__(self, where: str = "", error: BaseException | None = None):
        self.where, self.error = where, error
        self.called: list[str] = []

    def _call(self, verb: str) -> None:
        self.called.append(verb)
        if verb == self.where:
            assert self.error is not None
            raise self.error

    def propose(self, batch: Batch) -> Drafts:
        self._call("propose")
        return Drafts.chain(torch.full((len(batch), D + 2), 7), torch.full((len(batch), D + 2), 0.5))

    def observe(self, committed: Committed) -> None:
        self._call("observe")

    def move(self, source: int, destination: int) -> None:
        self._call("move")

    def copy(self, source: int, destination: int, length: int) -> None:
        self._call("copy")

    def free(self, slot: int) -> None:
        self._call("free")


ARGUMENTS: dict[str, tuple[Any, ...]] = {"observe": (NOTHING,), "move": (1, 0), "copy": (0, 1, 4), "free": (1,)}


def make(drafter: BoundDrafter | None, tree: bool = False, **options: Any) -> Drafting:
    return Drafting(drafter, D, DCutConfig(0.5), 101, tree, Ranks().agree, **options)


def test_only_the_first_of_a_block_are_used(make_batch: Any) -> None:
    drafts = make(Fragile()).propose(make_batch([4, 5]), [])
    assert drafts is not None
    assert (tuple(drafts.token.shape), drafts.count.tolist()) == ((2, D), [D, D])


class Branching(Fragile):
    """Makes trees of five nodes too, the anchor's children."""

    def propose_tree(self, batch: Batch, nodes: int) -> Drafts:
        self._call("propose_tree")
        numbers = torch.tensor([[0.5, 1.0, 0.5, 1.0, 1.0]]).expand(len(batch), D + 2)
        token = torch.arange(D + 2).expand(len(batch), D + 2)
        return Drafts(token, torch.full((len(batch),), D + 2), numbers, torch.full_like(token, -1))


def asking(*processors: LogitsProcessor, walked: bool = False) -> Request:
    """Returns a request that decodes, with these processors."""
    given = {"walked" if walked else "processors": LogitsProcessorList(processors)}
    return Request(0, [1, 2], 9, read=2, tokens=[5], **given)


PLAIN, WARPED = Request(0, [1, 2], 9, read=2, tokens=[5]), asking(TemperatureLogitsWarper(0.5))


def test_only_the_first_nodes_of_a_tree_are_used(make_batch: Any) -> None:
    drafts = make(Branching(), tree=True).propose(make_batch([4, 5]), [PLAIN, WARPED])
    assert drafts is not None
    assert drafts.parent is not None
    assert drafts.parent.tolist() == [[-1] * D] * 2
    assert drafts.token.tolist() == [[0, 1, 2]] * 2
    assert (tuple(drafts.confidence.shape), drafts.count.tolist()) == ((2, D), [D, D])


@pytest.mark.parametrize(
    ("requests", "tree"),
    [
        ([PLAIN, PLAIN], True),
        ([PLAIN, WARPED], True),
        ([PLAIN, asking(RepetitionPenaltyLogitsProcessor(1.5))], False),
        ([asking(TemperatureLogitsWarper(0.5), walked=True), PLAIN], False),
    ],
    ids=["nothing", "scores alone", "the text", "walked"],
)
def test_whoever_looks_at_the_text_is_given_chains(make_batch: Any, requests: list[Request], tree: bool) -> None:
    for wanted in (True, False):
        fragile = Branching()
        drafts = make(fragile, tree=wanted).propose(make_batch([4, 5]), requests)
        assert drafts is not None
        assert (drafts.parent is not None, fragile.called == ["propose_tree"]) == (tree and wanted,) * 2


def test_processes_agree_on_trees_too(make_batch: Any) -> None:
    seen = []

    def agree(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.append(len(tensors))
        return tuple(x + 1 for x in tensors)

    for tree in (False, True):
        drafts = Drafting(Branching(), D, DCutConfig(0.5), 101, tree, agree).propose(make_batch([4]), [PLAIN])
        assert drafts is not None
        assert (drafts.count.tolist(), drafts.token[0, 0].item()) == ([D + 1], 1 if tree else 8)
        assert drafts.parent is None or drafts.parent.tolist() == [[0] * D]
    assert seen == [3, 4]


@pytest.mark.parametrize("verb", ["propose", *ARGUMENTS])
@pytest.mark.parametrize("error", [RuntimeError("broken"), IndexError("broken"), ZeroDivisionError("broken")], ids=repr)
def test_a_drafter_that_fails_is_given_up(
    make_batch: Any, caplog: pytest.LogCaptureFixture, verb: str, error: Exception
) -> None:
    fragile = Fragile(verb, error)
    drafting = make(fragile)
    arguments = (make_batch([4]), []) if verb == "propose" else ARGUMENTS[verb]
    with caplog.at_level(logging.WARNING, "hf_dcut"):
        assert getattr(drafting, verb)(*arguments) is None
        for other, given in ARGUMENTS.items():
            getattr(drafting, other)(*given)
    assert (drafting.drafter, fragile.called) == (None, [verb])
    (line,) = caplog.messages
    assert f"failed to {verb} ({type(error).__name__}: broken)" in line


@pytest.mark.parametrize("error", [KeyboardInterrupt(), AssertionError("ours"), MemoryError()], ids=repr)
def test_what_is_not_the_drafters_fault_goes_up(error: BaseException) -> None:
    drafting = make(Fragile("observe", error))
    with pytest.raises(type(error)):
        drafting.observe(NOTHING)


def test_too_many_requests_at_once_are_the_engines_business(make_batch: Any) -> None:
    drafting = make(Fragile("propose", torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        drafting.propose(make_batch([4]), [])
    assert drafting.drafter is not None


def test_strict_raises_all(make_batch: Any) -> None:
    with pytest.raises(RuntimeError, match="broken"):
        make(Fragile("propose", RuntimeError("broken")), strict=True).propose(make_batch([4]), [])


def test_without_a_drafter_there_is_nothing_to_do() -> None:
    for verb, arguments in ARGUMENTS.items():
        getattr(make(None), verb)(*arguments)


class Taking(Fragile):
    """Keeps the cells of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[list[int]] = []

    def observe(self, committed: Committed) -> None:
        super().observe(committed)
        self.cells.append(committed.cell.tolist())


def rows(*cells: int) -> Committed:
    column = torch.tensor(cells)
    return Committed(column * 0, column, column, column + 5, column[:, None] / 2, (0,), (0,), (len(cells),), ())


def test_rows_that_wait_come_first_when_others_are_taken_in() -> None:
    taking = Taking()
    drafting = make(taking)
    drafting.observe(rows(0, 1), at_once=False)
    drafting.observe(rows(2), at_once=False)
    assert taking.cells == []
    drafting.observe(rows(3))
    drafting.observe(rows(4))
    assert taking.cells == [[0, 1, 2, 3], [4]]


@pytest.mark.parametrize("verb", ["move", "copy", "free"])
def test_rows_that_wait_are_taken_in_before_slots_change_hands(verb: str) -> None:
    taking = Taking()
    drafting = make(taking)
    drafting.observe(rows(0, 1), at_once=False)
    for _ in range(2):
        getattr(drafting, verb)(*ARGUMENTS[verb])
    assert taking.called == ["observe", verb, verb]


def test_only_so_many_rows_wait() -> None:
    taking = Taking()
    drafting = make(taking)
    drafting.observe(rows(*range(1000)), at_once=False)
    assert taking.cells == []
    drafting.observe(rows(*range(1000, 1030)), at_once=False)
    assert taking.cells == [list(range(1030))]


def test_rows_that_wait_are_taken_in_before_a_draft(make_batch: Any) -> None:
    taking = Taking()
    drafting = make(taking)
    drafting.observe(rows(0), at_once=False)
    drafting.propose(make_batch([4]), [])
    assert taking.called == ["observe", "propose"]


def test_rows_that_cannot_be_taken_in_make_a_plain_step(make_batch: Any) -> None:
    fragile = Fragile("observe", RuntimeError("broken"))
    drafting = make(fragile)
    drafting.observe(rows(0), at_once=False)
    assert drafting.propose(make_batch([4]), []) is None
    assert (drafting.drafter, fragile.called) == (None, ["observe"])


@pytest.mark.parametrize("positions", [(), (3,)], ids=["text", "images"])
@pytest.mark.parametrize("tapped", [True, False])
def test_steps_are_joined_in_their_order(positions: tuple[int, ...], tapped: bool) -> None:
    steps = []
    for first, count in ((0, 2), (2, 1), (3, 4)):
        rows = torch.arange(first, first + count)
        taps = rows[:, None] / 2 if tapped else None
        steps.append(
            Committed(rows, rows + 10, rows.expand(*positions, count), rows + 30, taps, (0,), (0,), (count,), (0,))
        )
    whole, rows = joined(steps), torch.arange(7)
    assert torch.equal(whole.slot, rows)
    assert torch.equal(whole.cell, rows + 10)
    assert torch.equal(whole.position, rows.expand(*positions, 7))
    assert torch.equal(whole.token, rows + 30)
    assert (whole.taps is None) is not tapped
    assert whole.taps is None or torch.equal(whole.taps, rows[:, None] / 2)
    assert (whole.added, whole.finished) == ((2, 1, 4), ())
    assert joined(steps[:1]) is steps[0]
