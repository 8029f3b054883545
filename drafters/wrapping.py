"""`Wrapped`: a drafter whose drafts go through a function before the engine sees them."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel

from hf_dcut.drafters.base import BoundDrafter, Drafter
from hf_dcut.types import Batch, Committed, Drafts

Change = Callable[[Drafts, Batch], Drafts]


class Wrapped(Drafter):
    """A drafter with a function behind it.

    Args:
        drafter: who proposes.
        change: from its drafts to those the engine gets.
    """

    def __init__(self, drafter: Drafter, change: Change):
        self.drafter, self.change = drafter, change
        self.draft_tokens, self.taps, self.layers = drafter.draft_tokens, drafter.taps, drafter.layers
        self.branches, self.remembers, self.networks = drafter.branches, drafter.remembers, drafter.networks

    def check(self, target: PreTrainedModel) -> None:
        self.drafter.check(target)

    def bind(self, target: PreTrainedModel, slots: int, length: int) -> BoundDrafter:
        return BoundWrapped(self.drafter.bind(target, slots, length), self.change)

    def cell_bytes(self, target: PreTrainedModel) -> int:
        return self.drafter.cell_bytes(target)

    def fingerprint(self) -> dict[str, object]:
        return self.drafter.fingerprint()


class BoundWrapped(BoundDrafter):
    """The same while it serves a call; arguments as of `Wrapped`. A graph can hold it if the function says so too."""

    def __init__(self, drafter: BoundDrafter, change: Change):
        self.drafter, self.change = drafter, change
        self.capturable = drafter.capturable and getattr(change, "capturable", False)

    def observe(self, committed: Committed) -> None:
        self.drafter.observe(committed)

    def propose(self, batch: Batch) -> Drafts:
        return self.change(self.drafter.propose(batch), batch)

    def propose_tree(self, batch: Batch, nodes: int) -> Drafts:
        return self.change(self.drafter.propose_tree(batch, nodes), batch)

    def move(self, source: int, destination: int) -> None:
        self.drafter.move(source, destination)

    def copy(self, source: int, destination: int, length: int) -> None:
        self.drafter.copy(source, destination, length)

    def free(self, slot: int) -> None:
        self.drafter.free(slot)
