"""The loop. The only file that knows the order of the stages:

    draft -> select (scores, budget, packing, branching) -> verify -> accept (choosing, acceptance) -> commit -> observe

Host reads of a step: candidate budgets in `budget.cut` or `selecting.py`, the outcome in `commit.commit`, for trees and
recurrent states in `cache.py`, where rows are padded and prompts lie in `grouped.py` and `recurrence.py`, the reach of
a block in `drafters/dflash/bound.py`. A replayed step (`fixed_step.py` has its stages, and observes before it accepts)
reads its budget in `graphs.py` where that is asked for, its outcome, and then its drafts' confidences in
`replaying.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

import torch

from hf_dcut.acceptance import accept
from hf_dcut.branching import branch
from hf_dcut.budget import NonFiniteScores
from hf_dcut.cache import SlotCache
from hf_dcut.calibration import Calibration
from hf_dcut.choosing import choose, takes_likeliest
from hf_dcut.commit import commit
from hf_dcut.config import DCutConfig
from hf_dcut.cost_table import CostTable
from hf_dcut.drafters.base import BoundDrafter
from hf_dcut.drafting import Drafting
from hf_dcut.graphs import Graphs
from hf_dcut.packing import Chunk, join, pack_plain
from hf_dcut.ranks import Ranks
from hf_dcut.replaying import Replaying
from hf_dcut.requests import Request, batch_of
from hf_dcut.scheduling import Roster, chunks_of, common_cells, source_of
from hf_dcut.selecting import select
from hf_dcut.skipping import SkipRule
from hf_dcut.stats import Stats, StepRecord, Stopwatch
from hf_dcut.target import Target
from hf_dcut.types import Batch, Committed, Cut, Drafts, Packed, Verified

logger = logging.getLogger(__name__)


class Engine:
    """Generates for any number of requests, as many at once as the cache has slots.

    Args:
        target: the model that decides.
        cache: its K/V.
        drafter: who proposes; None decodes plainly.
        depth: D, drafts used of a block; nodes of a tree.
        config: how drafts are cut.
        costs: seconds of steps, needed for the "auto" budget.
        stats: where steps are counted.
        graphs: recorded steps; None where all run eagerly.
        ranks: the processes that hold the target; this one alone when None.
        balance: what drafting has gained so far, as in `SkipRule`.
        tree: whether drafts may be trees.
    """

    def __init__(
        self,
        target: Target,
        cache: SlotCache,
        drafter: BoundDrafter | None,
        depth: int,
        config: DCutConfig,
        costs: CostTable | None,
        stats: Stats,
        graphs: Graphs | None = None,
        ranks: Ranks | None = None,
        balance: float = 0.0,
        tree: bool = False,
    ):
        self.target, self.cache, self.depth = target, cache, depth
        self.config, self.costs, self.stats = config, costs, stats
        self.replaying, self.ranks = Replaying(graphs, costs, depth), ranks or Ranks()
        agree, strict = self.ranks.agree, self.ranks.size > 1
        self.drafting = Drafting(drafter, depth, config, target.vocabulary, tree, agree, strict)
        self.roster, self.reading = Roster(cache.slots), config.max_prefill_tokens
        self.skip, self.calibration = SkipRule(costs, balance) if costs else None, Calibration()

    def run(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Yields the requests as they finish. Their seeds are the first process's."""
        for request in self.ranks.seeded(requests):
            self.roster.add(request)
        while self.busy:
            yield from self.step()

    @property
    def busy(self) -> bool:
        """Whether anybody is live or waits."""
        return bool(self.roster.live or self.roster.waiting)

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Returns the requests that one step of everything live finished."""
        watch = Stopwatch()
        self.roster.admit()
        self._share()
        chunks = chunks_of(self.roster.reading, self.reading, self.cache.recurrent)
        # Images are read by the model's own forward, for which those who decode wait.
        decoding = [] if chunks and chunks[0].media else self.roster.decoding
        live = [*decoding, *self.roster.reading[: len(chunks)]]
        ratios = self._ratios(decoding)
        try:
            row = self._verify(decoding, chunks, ratios, watch)
        except torch.OutOfMemoryError as error:
            return self._shrink(error)
        committed = self._settle(row, live, watch)
        self.stats.occupy(self.cache.slots, self.cache.length, [request.length for request in live])
        self._share()
        self._release([request for request in live if request.finish_reason])
        chosen, ranked = self.replaying.read(row, ratios, self.calibration.belief)
        if not ranked:
            self.drafting.unranked()
        self._account(decoding, chunks, row, chosen, committed, watch)
        for request, count in zip(live, committed.added, strict=True):
            request.tell(count)
        return [live[index] for index in committed.finished]

    @torch.no_grad()
    def advance(self, decoding: Sequence[Request], ratios: Sequence[float] | None) -> None:
        """Takes requests in slots 0 .. B-1 through one step, for measuring; a plain one without `ratios`."""
        watch = Stopwatch()
        self._settle(self._verify(decoding, [], ratios, watch), decoding, watch)

    def cancel(self, request: Request) -> None:
        """Ends a request that waits or is live; its slot is free at once. Not while a step runs."""
        request.finish_reason = "cancelled"
        self._release([request])

    def evict(self, request: Request) -> None:
        """Takes the slot of a live request, which waits again and then goes on as if nothing had happened.

        What was stored is computed anew, and each draw is keyed by its position, so its tokens stay the same.
        """
        self._release([request])
        request.lose_slot()
        self.roster.add(request)
        self.stats.evictions += 1

    def _shrink(self, error: torch.OutOfMemoryError) -> list[Request]:
        """Halves what a step may hold, after one did not fit into memory; returns a request for which nothing helps."""
        roster = self.roster
        if self.ranks.size > 1:
            error.add_note("several processes hold the model, and cannot go back: lower max_batch_size")
            raise error
        if len(roster.live) == 1 and self.reading == 1:
            (request,) = roster.live
            if not request.isolated:
                raise error
            request.finish_reason, request.error = "error", error
            self._release([request])
            return [request]
        roster.slots, self.reading = max(1, len(roster.live) // 2), max(1, self.reading // 2)
        for request in roster.live[roster.slots :]:
            self.evict(request)
        logger.warning(
            "out of memory: going on with %d requests at once and %d prompt tokens a step; nothing is lost. Lower "
            "max_batch_size or max_prefill_tokens to begin with",
            *(roster.slots, self.reading),
        )
        if self.target.device.type == "cuda":
            torch.cuda.empty_cache()
        return []

    def _share(self) -> None:
        """Lets requests that begin on a prompt which another has read copy it."""
        for request in self.roster.reading:
            source = None if request.read else source_of(request, self.roster.live, self.cache.recurrent)
            if source is not None:
                request.read = common_cells(request)
                self.stats.shared_tokens += request.read
                for holder in (self.cache, self.drafting):
                    holder.copy(source.slot, request.slot, request.read)

    def _release(self, leaving: Sequence[Request]) -> None:
        """Lets requests go, and closes the gaps they leave in the slots."""
        before = len(self.roster.live)
        moves = self.roster.release(leaving)
        for holder in (self.cache, self.drafting):
            for source, destination in moves:
                holder.move(source, destination)
            for slot in range(len(self.roster.live), before):
                holder.free(slot)

    def _verify(
        self, decoding: Sequence[Request], chunks: Sequence[Chunk], ratios: Sequence[float] | None, watch: Stopwatch
    ) -> Verified:
        """Returns what the target says of the step's row. Changes no request, so that it can be done again.

        Args:
            decoding: requests in slots 0 .. B-1.
            chunks: pieces of prompts that are read, in the slots after those.
            ratios: budgets to choose from; None for a plain step.
            watch: takes the seconds of each stage.
        """
        replayed = None if chunks else self.replaying.run(decoding, ratios, self.calibration.belief)
        if replayed is not None:
            watch.lap("verify")
            return replayed
        batch = batch_of(decoding, self.target.device)
        drafts = self.drafting.propose(batch, decoding) if ratios else None
        watch.lap("draft")
        ahead = 1 if drafts is None else self.depth + 1
        reach = min(self.cache.length, max((r.length for r in decoding), default=0) + ahead)
        packed, chosen = self._select(drafts, batch, ratios or (), reach)
        packed = join(packed, chunks)
        watch.lap("select")
        logits, taps = self.target.forward(packed, self.cache)
        watch.lap("verify")
        return Verified(packed, chosen, drafts.proposal if drafts is not None else None, logits, taps)

    def _settle(self, row: Verified, requests: Sequence[Request], watch: Stopwatch) -> Committed:
        """Returns what became part of the requests of the row, in its order."""
        verdict, choice = row.likeliest, None
        if verdict is None or not takes_likeliest(requests) or any(r.keeps_scores for r in requests):
            choice = choose(row.logits, row.packed, requests, row.proposal)
            (token,) = self.ranks.agree(choice.token)
            verdict = accept(token, row.packed)
        watch.lap("accept")
        committed = commit(verdict, row.packed, choice, row.logits, row.taps, requests, self.cache)
        if any(request.walked for request in requests):
            self.ranks.check({"logits_processor": [request.finish_reason for request in requests]})
        watch.lap("commit")
        if not row.packed.fixed:
            # Recorded steps take in their own rows, which must not come before any that wait.
            pausing = self.skip is not None and self.skip.pausing and self.replaying.graphs is None
            self.drafting.observe(committed, at_once=not pausing)
        watch.lap("observe")
        return committed

    def _select(
        self, drafts: Drafts | None, batch: Batch, ratios: Sequence[float], reach: int
    ) -> tuple[Packed, Cut | None]:
        """Returns the packed row and the cut. Drafts that cannot be ranked are dropped: the step is plain."""
        if drafts is not None:
            try:
                packed, chosen = select(drafts, batch, ratios, self.costs, reach, self.calibration.belief)
            except NonFiniteScores:
                self.drafting.unranked()
            else:
                self.replaying.saw(chosen)
                return packed if drafts.parent is None else branch(packed, drafts.parent), chosen
        return pack_plain(batch, reach), None

    def _ratios(self, decoding: Sequence[Request]) -> Sequence[float] | None:
        """Returns the budgets the next step chooses from; None when it does not draft."""
        if self.drafting.drafter is None or all(request.room <= 0 for request in decoding):
            return None
        if self.config.budget == "auto":
            assert self.skip is not None
            if not self.skip.drafts_next():
                return None
        return self.config.candidates(self.replaying.graphs is not None) or None

    def _account(
        self,
        decoding: Sequence[Request],
        chunks: Sequence[Chunk],
        row: Verified,
        chosen: Cut | None,
        committed: Committed,
        watch: Stopwatch,
    ) -> None:
        """Counts the step, and lets it correct the costs and the skipping of drafts."""
        rows, seconds, total = len(decoding), watch.stop(), len(row.packed)
        record = StepRecord(
            requests=[request.id for request in decoding],
            drafted=list(chosen.offered) if chosen else [0] * rows,
            kept=list(committed.kept[:rows]),
            accepted=list(committed.accepted[:rows]),
            committed=list(committed.added[:rows]),
            budget=chosen.budget if chosen else None,
            total=total,
            seconds=seconds,
        )
        self.stats.add(record, self.depth)
        self.stats.took(seconds["total"])
        self.stats.new_tokens += sum(committed.added)
        self.stats.prompt_tokens += sum(len(chunk.token) for chunk in chunks)
        if self.costs is None or not rows:
            return
        kv_length = max(request.length for request in decoding)
        # Prompts aside, and the share of those who are somebody: a step of a few more rows cost as much as it did.
        total -= sum(len(chunk.token) for chunk in chunks)
        total = round(total * rows / (rows + row.spare))
        if not chunks and not self.config.deterministic:
            self.costs.observe(rows, total if chosen else 0, self.ranks.number(seconds["total"]), kv_length)
        if chosen and self.skip:
            added = committed.added[:rows]
            self.skip.observe(added, total, kv_length, self.roster.nearer(decoding, added))
            self.calibration.observe(chosen.promised, sum(committed.accepted[:rows]))
