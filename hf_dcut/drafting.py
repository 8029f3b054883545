"""`Drafting`: the drafter's side of a call. What goes wrong there costs speed, never a request.

Drafts are guesses, so a step without them is a step all the same. A drafter whose code raises is not asked again during
the call; drafts that cannot be ranked are left out. Either is said once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_dcut.choosing import branches
from hf_dcut.config import DCutConfig
from hf_dcut.drafters.base import BoundDrafter
from hf_dcut.drawing import draw_drafts
from hf_dcut.requests import Request
from hf_dcut.types import Batch, Committed, Drafts

logger = logging.getLogger(__name__)

# What a model's or a look-up's code raises: shapes, dtypes, devices, indices, numbers. Interrupts and assertions, which
# are our own, go up.
FAULTS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

# Rows that may wait to be taken in: few megabytes of taps.
_MOST_WAITING = 1024


class Drafting:
    """A bound drafter, or none, that never fails.

    Args:
        drafter: who proposes; None decodes plainly.
        depth: D, drafts used of a block; nodes of a tree.
        config: how drafts are made.
        vocabulary: V, of the target.
        tree: whether drafts may be trees.
        agree: makes tensors the same in all processes.
        strict: whether the drafter's errors are raised after all: while its costs are measured, or where another
            process might go on drafting.
    """

    def __init__(
        self,
        drafter: BoundDrafter | None,
        depth: int,
        config: DCutConfig,
        vocabulary: int,
        tree: bool,
        agree: Callable[..., tuple[Tensor, ...]],
        strict: bool = False,
    ):
        self.drafter, self.depth, self.config, self.vocabulary = drafter, depth, config, vocabulary
        self.tree, self.agree, self.strict = tree, agree, strict
        self._waiting: list[Committed] = []
        self._warned = False

    def propose(self, batch: Batch, decoding: Sequence[Request]) -> Drafts | None:
        """Returns the first D drafts of the drafter's block or tree, its likeliest or drawn; None if it failed.

        Raises:
            torch.OutOfMemoryError: too many requests at once.
        """
        self._catch_up()
        if self.drafter is None:
            return None
        with self._watch("propose") as drafter:
            if self.config.proposals == "sampled" and all(request.samples for request in decoding):
                logits, ids = drafter.propose_logits(batch)
                drafts = draw_drafts(logits, ids, batch, decoding, self.vocabulary)
            elif self.tree and all(branches(request) for request in decoding):
                drafts = drafter.propose_tree(batch, self.depth)
            else:
                drafts = drafter.propose(batch)
            return self._agreed(drafts.first(self.depth))
        return None

    def _agreed(self, drafts: Drafts) -> Drafts:
        """Returns the drafts that the first process made."""
        token, count, confidence, *parent = self.agree(
            drafts.token, drafts.count, drafts.confidence, *([] if drafts.parent is None else [drafts.parent])
        )
        return Drafts(token, count, confidence, parent[0] if parent else None, drafts.proposal)

    def observe(self, committed: Committed, at_once: bool = True) -> None:
        """Takes in what became part of the requests.

        Args:
            committed: the rows.
            at_once: False while nothing is drafted: then the rows wait for those of the next steps, since taking in
                those of many steps takes hardly longer than those of one.
        """
        if self.drafter is not None:
            self._waiting.append(committed)
            if at_once or sum(len(rows.token) for rows in self._waiting) > _MOST_WAITING:
                self._catch_up()

    def move(self, source: int, destination: int) -> None:
        """Moves a request's state to another slot."""
        self._catch_up()
        self._do("move", source, destination)

    def copy(self, source: int, destination: int, length: int) -> None:
        """Gives a slot the state of another's first `length` cells."""
        self._catch_up()
        self._do("copy", source, destination, length)

    def free(self, slot: int) -> None:
        """Forgets the state of a slot."""
        self._catch_up()
        self._do("free", slot)

    def unranked(self) -> None:
        """Says, once, that a step is plain since its drafts have no finite confidences."""
        self._warn("the drafter gave non-finite confidences: such steps decode plainly, the output stays the target's")

    def _catch_up(self) -> None:
        """Takes in the rows that wait."""
        if self._waiting:
            committed, self._waiting = joined(self._waiting), []
            self._do("observe", committed)

    def _do(self, verb: str, *arguments: Any) -> None:
        if self.drafter is not None:
            with self._watch(verb) as drafter:
                getattr(drafter, verb)(*arguments)

    @contextmanager
    def _watch(self, verb: str) -> Iterator[BoundDrafter]:
        """Gives the drafter; if it raises, it is given up for the rest of the call."""
        assert self.drafter is not None
        try:
            yield self.drafter
        except FAULTS as error:
            memory = isinstance(error, torch.OutOfMemoryError) and verb == "propose"
            if self.strict or memory:
                raise
            self.drafter = None
            what = f"{type(error).__name__}: {error}"
            self._warn(
                f"the drafter failed to {verb} ({what}): decoding plainly from here, the output stays the target's"
            )

    def _warn(self, message: str) -> None:
        if not self._warned:
            logger.warning(message)
        self._warned = True


def joined(steps: Sequence[Committed]) -> Committed:
    """Returns the rows of several steps, in their order; nobody in them is counted as finished."""
    if len(steps) == 1:
        return steps[0]
    taps = [step.taps for step in steps if step.taps is not None]
    return Committed(
        slot=torch.cat([step.slot for step in steps]),
        cell=torch.cat([step.cell for step in steps]),
        position=torch.cat([step.position for step in steps], dim=-1),
        token=torch.cat([step.token for step in steps]),
        taps=torch.cat(taps) if taps else None,
        kept=tuple(count for step in steps for count in step.kept),
        accepted=tuple(count for step in steps for count in step.accepted),
        added=tuple(count for step in steps for count in step.added),
        finished=(),
    )
