"""`FixedStep`: the stages of a step that run on the device alone, at a shape given beforehand, as one function.

    draft -> select_fixed -> verify -> observe -> accept, as greedy requests do

It takes tensors and gives tensors, of the same shapes every time, and reads nothing on the host: what a CUDA graph can
record. A step whose T is chosen by its own drafts is two such functions, with one host read between them:

    draft -> choose_fixed    |    select_fixed -> verify -> observe -> accept

There is no padding that nobody uses. Places of the packed row that a budget leaves free go to the next-best
drafts, and spare rows of the batch are empty requests in slots that nobody holds.

The drafter observes all rows, since which of them are committed is not known yet. What it stores of rejected ones lies
behind its request's end, where the next step writes before anybody reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_dcut.acceptance import accept
from hf_dcut.cache import SlotCache
from hf_dcut.drafters.base import BoundDrafter
from hf_dcut.packing import pack_plain
from hf_dcut.selecting import choose_fixed, select_fixed
from hf_dcut.target import Target
from hf_dcut.types import Batch, Committed, Drafts, Packed, Record, Verdict


@dataclass(frozen=True, slots=True)
class FixedRow(Record):
    """What a fixed step comes to. Its tensors are overwritten by the next one.

    Attributes:
        packed: the row.
        logits: [T, V].
        likeliest: the verdict if the likeliest tokens are the target's.
        told: float64 [B, D+1], each request's confidences and how many drafts it has; None in plain steps. For the host
            to read once the step is over.
        spare: rows of the batch that belong to nobody.
    """

    packed: Packed
    logits: Tensor
    likeliest: Verdict
    told: Tensor | None
    spare: int = 0

    def of(self, requests: int) -> FixedRow:
        """Returns the part of the first so many requests. Spare rows stay behind them, in no request."""
        start, used = self.packed.start[: requests + 1], self.packed.used[:requests]
        packed = replace(self.packed, start=start, used=used, decoding=requests, slots=requests)
        told, given = None if self.told is None else self.told[:requests], self.likeliest
        verdict = Verdict(given.accepted[:requests], given.next[:requests], given.path[:requests])
        spare = self.spare + self.packed.decoding - requests
        return FixedRow(packed, self.logits, verdict, told, spare)


class FixedStep:
    """Drafts and verifies at given shapes: in one go, or `draft` first and then the rest.

    Args:
        target: the model that decides.
        cache: its K/V; each slot has D cells behind the longest request.
        drafter: who proposes; None for plain steps alone.
        depth: D, drafts used of a block.
    """

    def __init__(self, target: Target, cache: SlotCache, drafter: BoundDrafter | None, depth: int):
        self.target, self.cache, self.drafter, self.depth = target, cache, drafter, depth
        # Logits of the largest shape. Those of all shapes are written here, so that recorded steps hold no others.
        self.logits: Tensor | None = None

    def inputs(self, rows: int) -> Tensor:
        """Returns a buffer for the columns of a `Batch` of B rows: int64 [6, B], empty requests at first."""
        columns = torch.zeros(6, rows, dtype=torch.int64, device=self.target.device)
        columns[0] = torch.arange(rows, device=columns.device)
        return columns

    def blank(self, rows: int) -> Drafts:
        """Returns a buffer for the drafts of B requests."""
        token = torch.zeros(rows, self.depth, dtype=torch.int64, device=self.target.device)
        return Drafts.chain(token, token.float())

    @torch.no_grad()
    def draft(self, columns: Tensor, menu: Tensor, drafts: Drafts) -> Tensor:
        """Returns the index of the best budget, int64 [1], and fills in the drafts.

        Args:
            columns: int64 [6, B], as in `requests.table_of`.
            menu: float64 [3, C], the budgets, as `selecting.menu_of` writes them.
            drafts: a buffer from `blank`.
        """
        batch = self._batch(columns)
        made = self._drafts(batch)
        for kept, new in ((drafts.token, made.token), (drafts.count, made.count), (drafts.confidence, made.confidence)):
            kept.copy_(new)
        return choose_fixed(drafts, batch, menu)

    @torch.no_grad()
    def __call__(self, columns: Tensor, total: int, drafts: Drafts | None = None) -> FixedRow:
        """Returns the verified row of T = `total` places; 0 for a step without drafts.

        Args:
            columns: int64 [6, B], as in `requests.table_of`.
            total: 0, or from B to B (D+1). The first call must be one of the most packed tokens.
            drafts: those of a step that has any; it makes its own when None.
        """
        batch = self._batch(columns)
        if total:
            drafts = drafts or self._drafts(batch)
            packed = select_fixed(drafts, batch, total, self.cache.length)
            told = torch.cat([drafts.confidence.double(), torch.minimum(drafts.count, batch.room)[:, None]], 1)
        else:
            packed, told = replace(pack_plain(batch, self.cache.length), fixed=True), None
        logits, taps = self.target.forward(packed, self.cache)
        if self.drafter is not None:
            row = (packed.slot, packed.cell, packed.position, packed.token, taps)
            self.drafter.observe(Committed(*row, kept=(), accepted=(), added=(), finished=()))
        likeliest = accept(logits.float().argmax(dim=-1), packed)
        return FixedRow(packed, self._keep(logits), likeliest, told)

    def forget(self) -> None:
        """Frees all slots of what steps of made-up requests left in them."""
        for slot in range(self.cache.slots):
            self.cache.free(slot)
            if self.drafter is not None:
                self.drafter.free(slot)

    def _batch(self, columns: Tensor) -> Batch:
        return replace(Batch(*columns), reach=self.cache.length)

    def _drafts(self, batch: Batch) -> Drafts:
        """Returns the first D drafts of each block."""
        assert self.drafter is not None, "a step that drafts needs a drafter"
        return self.drafter.propose(batch).first(self.depth)

    def _keep(self, logits: Tensor) -> Tensor:
        """Returns the logits where they stay until the next step."""
        if self.logits is None:
            self.logits = torch.empty_like(logits)
        kept = self.logits[: len(logits)]
        kept.copy_(logits)
        return kept
