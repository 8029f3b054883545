"""`Priced`: an oracle's drafts at the price of a real drafter. All numbers made with it are synthetic."""

from __future__ import annotations

from transformers import PreTrainedModel

from hf_dcut.drafters.base import BoundDrafter, Drafter
from hf_dcut.drafters.oracle import OracleDrafter
from hf_dcut.types import Batch, Committed, Drafts


class Priced(Drafter):
    """Does all the work of one drafter and proposes the drafts of an oracle.

    Args:
        oracle: whose drafts are used.
        drafter: whose time is taken.
    """

    def __init__(self, oracle: OracleDrafter, drafter: Drafter):
        self.oracle, self.drafter = oracle, drafter
        self.draft_tokens, self.taps = oracle.draft_tokens, drafter.taps

    def check(self, target: PreTrainedModel) -> None:
        self.drafter.check(target)

    def bind(self, target: PreTrainedModel, slots: int, length: int) -> BoundDrafter:
        return _BoundPriced([d.bind(target, slots, length) for d in (self.drafter, self.oracle)])

    def cell_bytes(self, target: PreTrainedModel) -> int:
        return self.oracle.cell_bytes(target) + self.drafter.cell_bytes(target)

    def fingerprint(self) -> dict[str, object]:
        return {"kind": "priced", "drafter": self.drafter.fingerprint()}


class _BoundPriced(BoundDrafter):
    """Several drafters that see the same; the last one's drafts count."""

    def __init__(self, drafters: list[BoundDrafter]):
        self.drafters = drafters

    def observe(self, committed: Committed) -> None:
        for drafter in self.drafters:
            drafter.observe(committed)

    def propose(self, batch: Batch) -> Drafts:
        return [drafter.propose(batch) for drafter in self.drafters][-1]

    def move(self, source: int, destination: int) -> None:
        for drafter in self.drafters:
            drafter.move(source, destination)

    def copy(self, source: int, destination: int, length: int) -> None:
        for drafter in self.drafters:
            drafter.copy(source, destination, length)

    def free(self, slot: int) -> None:
        for drafter in self.drafters:
            drafter.free(slot)
