"""The loop. The only file that knows the order of the stages:

    draft -> select (scores, budget, packing) -> verify -> accept (choosing, acceptance) -> commit -> observe

Host reads of a step, all of them: the gains of the candidate budgets in `budget.cut`, the outcome in `commit.commit`,
where rows are padded and where prompts lie in `attention.py`, and the reach of a block in `drafters/dflash/bound.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hf_dcut.acceptance import accept
from hf_dcut.budget import NonFiniteScores, cut
from hf_dcut.cache import SlotCache
from hf_dcut.choosing import choose
from hf_dcut.commit import commit
from hf_dcut.config import DCutConfig
from hf_dcut.cost_table import CostTable
from hf_dcut.drafters.base import BoundDrafter
from hf_dcut.drawing import draw_drafts
from hf_dcut.graphs import ExactShapes
from hf_dcut.kernels import select_path
from hf_dcut.packing import Chunk, join, pack
from hf_dcut.requests import Request, Roster, batch_of
from hf_dcut.scores import score
from hf_dcut.selecting import select_at_once
from hf_dcut.skipping import SkipRule
from hf_dcut.stats import Stats, StepRecord, Stopwatch
from hf_dcut.target import Target
from hf_dcut.types import Batch, Committed, Cut, Drafts, Packed

logger = logging.getLogger(__name__)


def same(tensor: Tensor) -> Tensor:
    """Returns the tensor: what all processes agree on when there is only one."""
    return tensor


class Engine:
    """Generates for any number of requests, as many at once as the cache has slots.

    Args:
        target: the model that decides.
        cache: its K/V.
        drafter: who proposes; None decodes plainly.
        depth: D, drafts used of a block.
        config: how drafts are cut.
        costs: seconds of steps, needed for the "auto" budget.
        stats: where steps are counted.
        shapes: sizes a step may have.
        agree: makes a tensor the same on all processes.
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
        shapes: ExactShapes | None = None,
        agree: Callable[[Tensor], Tensor] = same,
    ):
        self.target, self.cache, self.drafter, self.depth = target, cache, drafter, depth
        self.config, self.costs, self.stats = config, costs, stats
        self.shapes, self.agree = shapes or ExactShapes(), agree
        self.roster = Roster(cache.slots)
        self.skip = SkipRule(costs) if costs else None
        self._warned = False

    @torch.no_grad()
    def run(self, requests: Sequence[Request]) -> Iterator[Request]:
        """Yields the requests as they finish."""
        self.roster.waiting.extend(requests)
        begin = time.perf_counter()
        while self.roster.live or self.roster.waiting:
            yield from self.step()
            self.stats.seconds = time.perf_counter() - begin

    def step(self) -> list[Request]:
        """Returns the requests that one step of everything live finished."""
        watch = Stopwatch()
        self.roster.admit()
        decoding, reading = self.roster.decoding, self.roster.reading
        chunks = self._chunks(reading)
        ratios = self._ratios(decoding)
        packed, chosen, committed = self.advance(decoding, reading[: len(chunks)], chunks, ratios, watch)
        live = decoding + reading[: len(chunks)]
        finished = [live[index] for index in committed.finished]
        _tell(live, committed.added)
        self._retire()
        self._account(decoding, chunks, len(packed), chosen, committed, watch)
        return finished

    def advance(
        self,
        decoding: Sequence[Request],
        reading: Sequence[Request],
        chunks: Sequence[Chunk],
        ratios: Sequence[float] | None,
        watch: Stopwatch,
    ) -> tuple[Packed, Cut | None, Committed]:
        """Returns the packed row, the cut (None in plain steps) and what was committed, after all stages ran once.

        Args:
            decoding: requests in slots 0 .. B-1.
            reading: requests that read a piece of their prompt, in the slots after those.
            chunks: these pieces.
            ratios: budgets to choose from; None for a plain step.
            watch: takes the seconds of each stage.
        """
        batch = batch_of(decoding, self.target.device)
        drafts = self._propose(batch, decoding) if ratios else None
        watch.lap("draft")
        reach = min(self.cache.length, max((r.length for r in decoding), default=0) + self.depth + 1)
        packed, chosen = self._select(drafts, batch, ratios or (), reach)
        packed = join(packed, chunks)
        watch.lap("select")
        logits, taps = self.target.forward(packed, self.cache)
        watch.lap("verify")
        requests = [*decoding, *reading]
        choice = choose(logits, packed, requests, drafts.proposal if drafts is not None else None)
        verdict = accept(self.agree(choice.token), packed)
        watch.lap("accept")
        committed = commit(verdict, packed, choice, logits, taps, requests, self.cache)
        watch.lap("commit")
        if self.drafter is not None:
            self.drafter.observe(committed)
        watch.lap("observe")
        return packed, chosen, committed

    def _retire(self) -> None:
        """Gives the slots of finished requests free and closes the gaps they leave."""
        before = len(self.roster.live)
        holders: list[SlotCache | BoundDrafter] = [self.cache]
        if self.drafter is not None:
            holders.append(self.drafter)
        moves = self.roster.retire()
        for holder in holders:
            for source, destination in moves:
                holder.move(source, destination)
            for slot in range(len(self.roster.live), before):
                holder.free(slot)

    def _propose(self, batch: Batch, decoding: Sequence[Request]) -> Drafts:
        """Returns the first D drafts of the drafter's block: its likeliest tokens, or drawn ones if so configured."""
        assert self.drafter is not None
        if self.config.proposals == "sampled" and all(request.samples for request in decoding):
            logits, ids = self.drafter.propose_logits(batch)
            drafts = draw_drafts(logits, ids, batch, decoding, self.target.vocabulary)
        else:
            drafts = self.drafter.propose(batch)
        token, parent, confidence = (x[:, : self.depth] for x in (drafts.token, drafts.parent, drafts.confidence))
        return Drafts(token, parent, drafts.count.clamp_max(self.depth), self.agree(confidence), drafts.proposal)

    def _select(
        self, drafts: Drafts | None, batch: Batch, ratios: Sequence[float], reach: int
    ) -> tuple[Packed, Cut | None]:
        """Returns the packed row and the cut. Drafts that cannot be ranked are dropped: the step is plain."""
        if drafts is not None:
            try:
                return select(drafts, batch, ratios, self.costs, self.shapes, reach)
            except NonFiniteScores:
                self._warn_once(
                    "the drafter gave non-finite confidences: such steps decode plainly, the output stays the target's"
                )
        return pack_plain(batch, reach), None

    def _ratios(self, decoding: Sequence[Request]) -> Sequence[float] | None:
        """Returns the budgets the next step chooses from; None when it does not draft."""
        if self.drafter is None or all(request.room <= 0 for request in decoding):
            return None
        if self.config.budget != "auto":
            return (float(self.config.budget),)
        assert self.skip is not None
        return self.config.ratios if self.skip.drafts_next() else None

    def _chunks(self, reading: Sequence[Request]) -> list[Chunk]:
        """Returns the pieces of prompts that fit into the step, in slot order."""
        chunks, left = [], self.config.max_prefill_tokens
        for request in reading:
            piece = request.prompt[request.read : request.read + left]
            if not piece:
                break
            last = request.read + len(piece) == len(request.prompt)
            chunks.append(Chunk(torch.tensor(piece), request.slot, request.read, request.rope, last))
            left -= len(piece)
        return chunks

    def _account(
        self,
        decoding: Sequence[Request],
        chunks: Sequence[Chunk],
        total: int,
        chosen: Cut | None,
        committed: Committed,
        watch: Stopwatch,
    ) -> None:
        """Counts the step, and lets it correct the costs and the skipping of drafts."""
        rows, seconds = len(decoding), watch.stop()
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
        self.stats.new_tokens += sum(committed.added)
        self.stats.prompt_tokens += sum(len(chunk.token) for chunk in chunks)
        if self.costs is None or chunks or not rows:
            return
        kv_length = max(request.length for request in decoding)
        if not self.config.deterministic:
            self.costs.observe(rows, total if chosen else 0, seconds["total"], kv_length)
        if chosen and self.skip:
            self.skip.observe(rows, total, sum(committed.added), kv_length)

    def _warn_once(self, message: str) -> None:
        if not self._warned:
            logger.warning(message)
        self._warned = True


def _tell(requests: Sequence[Request], added: Sequence[int]) -> None:
    """Hands each request's new tokens to whoever listens."""
    for request, count in zip(requests, added, strict=True):
        if request.listener is not None and count:
            request.listener(request.tokens[-count:], request.finish_reason is not None)


def select(
    drafts: Drafts, batch: Batch, ratios: Sequence[float], costs: CostTable | None, shapes: ExactShapes, reach: int
) -> tuple[Packed, Cut]:
    """Returns the packed row of the best cut, and the cut.

    Args:
        drafts: up to D drafts a request.
        batch: the requests.
        ratios: budgets to choose from.
        costs: seconds of steps; needed to choose between several ratios.
        shapes: sizes a step may have.
        reach: cells that any request can use after the step.

    Raises:
        NonFiniteScores: the drafts cannot be ranked.
    """
    if select_path(drafts.token.device, *drafts.token.shape) == "reference":
        chosen = cut(score(drafts, batch), ratios, costs.drafted if costs else None)
        packed = pack(drafts, chosen, batch, reach)
    else:
        packed, chosen = select_at_once(drafts, batch, ratios, costs, reach)
    assert shapes.round(len(batch), chosen.total) == (len(batch), chosen.total)
    return packed, chosen


def pack_plain(batch: Batch, reach: int) -> Packed:
    """Returns the packed row of a step without drafts: the anchors."""
    rows, device = len(batch), batch.slot.device
    none = Drafts.chain(batch.slot.new_zeros(rows, 0), torch.zeros(rows, 0, device=device))
    return pack(none, Cut(none.token.bool(), rows, 0.0, (0,) * rows), batch, reach)
