"""`Run`: one batch through the engine, a step at a time, with everything a step decided kept in a `Trace`."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from hf_dcut.app.curve import Curve, curve_of
from hf_dcut.app.models import Models
from hf_dcut.app.settings import Limits, Settings
from hf_dcut.app.trace import Answer, Draft, Piece, Row, Step, Trace
from hf_dcut.assembly import open_engine
from hf_dcut.bench.prompts import encode_each
from hf_dcut.branching import parents
from hf_dcut.config import DCutConfig
from hf_dcut.cost_table import CostTable
from hf_dcut.drafters.base import BoundDrafter, Drafter
from hf_dcut.requests import Request
from hf_dcut.scores import score
from hf_dcut.stats import Stats, StepRecord
from hf_dcut.streaming import BatchStreamer
from hf_dcut.types import Batch, Drafts

METHODS = {"cut": "D-cut", "all": "Verify everything", "plain": "Plain"}


class Run:
    """A batch being generated. Open it, step until it is done, close it.

    Args:
        models: loaded.
        settings: checked.
        limits: of the page.
        method: "cut" as the settings say, "all" to verify every draft, "plain" to draft nothing.

    Raises:
        ValueError, MemoryError: the prompts are too long, or do not fit into memory.
    """

    def __init__(self, models: Models, settings: Settings, limits: Limits, method: str = "cut"):
        settings.check(limits)
        self.models, self.settings = models, settings
        self.budget = {"cut": settings.budget, "all": 1.0, "plain": "none"}[method]
        self.drafter = None if method == "plain" else Watched(models.drafter(settings.drafter))
        self.requests = _requests(models, settings, limits)
        self.costs: CostTable | None = None
        self.trace = Trace(
            method=METHODS[method],
            depth=self.drafter.inner.draft_tokens if self.drafter else 0,
            new_tokens=settings.new_tokens,
            answers=[Answer(prompt) for prompt in settings.prompts],
            settings={**settings.to_dict(), "budget": self.budget, "target": models.name},
        )
        self._pieces: list[str] = []
        self._streamer = BatchStreamer(models.tokenizer, lambda piece: self._pieces.append(piece.text))
        self._open = ExitStack()
        # Closing, when a visitor leaves, must not take the caches from under a step.
        self._lock = threading.Lock()
        self.closed = False

    @property
    def done(self) -> bool:
        """Whether nothing is left to generate."""
        return self.trace.done

    def open(self) -> None:
        """Takes memory and measures the cost of steps where that is needed: seconds the first time, else nothing."""
        name, settings = self.settings.drafter, self.settings
        if self.budget == "auto":
            self.costs = self.models.costs(name, len(self.requests))
        elif self.drafter:
            self.costs = self.models.known_costs(name)
        config = DCutConfig(budget=self.budget, cost_table=self.costs if self.costs is not None else "off")
        prompt = max(len(request.prompt) for request in self.requests)
        engine = open_engine(
            self.models.model,
            self.drafter.watched if self.drafter else None,
            config,
            len(self.requests),
            prompt,
            prompt + settings.new_tokens,
            stats=Stats(records=[]),
        )
        self.engine = self._open.enter_context(engine)
        self.trace.depth = self.engine.depth
        for request in self.requests:
            self.engine.roster.add(request)

    def step(self) -> None:
        """Takes every request one step further. Steps that only read prompts leave no `Step` in the trace."""
        with self._lock, torch.no_grad():
            if self.closed:
                raise ValueError("this run was closed: start it again")
            before = [len(request.tokens) for request in self.requests]
            # The engine corrects its table after it has chosen; what it chose by is kept.
            costs = copy.deepcopy(self.costs)
            begin = time.perf_counter()
            self.engine.step()
            self.trace.seconds += time.perf_counter() - begin
            assert self.engine.stats.records is not None
            self._take(self.engine.stats.records[-1], before, costs)

    def close(self) -> None:
        """Gives the memory back; what was traced stays."""
        with self._lock:
            self.closed, self.trace.stopped = True, not self.done
            self._open.close()

    def _take(self, record: StepRecord, before: list[int], costs: CostTable | None) -> None:
        """Adds the step's tokens to the answers and the step to the trace."""
        accepted = dict(zip(record.requests, record.accepted, strict=True))
        last, agreed = {}, dict[int, list[int]]()
        for request, answer, start in zip(self.requests, self.trace.answers, before, strict=True):
            for place, token in enumerate(request.tokens[start:]):
                ends = request.finish_reason is not None and start + place + 1 == len(request.tokens)
                self._streamer.put(request.id, [token], ends)
                answer.pieces.append(Piece(token, self._pieces.pop(), place < accepted.get(request.id, 0)))
            agreed[request.id] = request.tokens[start:][: accepted.get(request.id, 0)]
            answer.finish_reason = request.finish_reason
            last[request.id] = answer.pieces[-1] if len(request.tokens) > start else None
        if not record.requests:
            return
        seen = self.drafter.take() if self.drafter else None
        rows = []
        for place, number in enumerate(record.requests):
            drafts = self._drafts(seen, place, record, agreed[number]) if seen and record.budget is not None else ()
            piece, answer = last[number], self.trace.answers[number]
            own = piece.text if piece and not piece.drafted else ""
            rows.append(Row(number, drafts, own, answer.finish_reason is not None))
        self.trace.steps.append(
            Step(
                rows=tuple(rows),
                budget=record.budget,
                verified=len(rows) + sum(record.kept),
                offered=len(rows) * (self.trace.depth + 1),
                seconds=record.seconds["total"],
                new_tokens=sum(len(r.tokens) for r in self.requests) - sum(before),
                curve=self._curve(rows, record, costs),
            )
        )

    def _drafts(self, seen: Seen, place: int, record: StepRecord, agreed: list[int]) -> tuple[Draft, ...]:
        """Returns the drafts of one request, which stands in this row of the batch, given those that were accepted."""
        token, parent, survival = (column[place] for column in (seen.token, seen.parent, seen.survival))
        path = [-1]
        for wanted in agreed:
            nodes = range(path[-1] + 1, len(token))
            path.append(next(node for node in nodes if parent[node] == path[-1] and token[node] == wanted))
        return tuple(
            Draft(
                token=token[node],
                text=self.models.tokenizer.decode([token[node]]),
                parent=parent[node],
                confidence=survival[node] / ((survival[parent[node]] if parent[node] >= 0 else 1.0) or 1.0),
                survival=survival[node],
                kept=node < record.kept[place],
                accepted=node in path,
            )
            for node in range(record.drafted[place])
        )

    def _curve(self, rows: list[Row], record: StepRecord, costs: CostTable | None) -> Curve | None:
        if costs is None or record.budget is None:
            return None
        survival = [draft.survival for row in rows for draft in row.drafts]
        ratios = self.engine.config.candidates()
        chosen = len(rows) + sum(record.kept)
        longest = max(request.length for request in self.requests)
        return curve_of(survival, len(rows), self.trace.depth, ratios, chosen, costs, longest)


class Seen:
    """What a drafter proposed in one step, in host numbers: token, parent and survival, [B][D]."""

    def __init__(self, drafts: Drafts, survival: Tensor):
        self.token, self.parent = drafts.token.tolist(), parents(drafts).tolist()
        self.survival = survival.tolist()


class Watched:
    """A drafter whose proposals are seen.

    Args:
        inner: the drafter, which stays as it is.

    Attributes:
        watched: a copy of it for `open_engine`, whose bound drafter leaves each proposal here.
    """

    def __init__(self, inner: Drafter):
        self.inner = inner
        self.watched = cast(Any, copy.copy(inner))
        self.watched.bind = self._bind
        self._seen: Seen | None = None

    def take(self) -> Seen | None:
        """Returns what was proposed since the last call; None in plain steps."""
        seen, self._seen = self._seen, None
        return seen

    def _bind(self, *args: Any) -> BoundDrafter:
        bound: Any = self.inner.bind(*args)

        def seen(propose: Callable[..., Drafts], batch: Batch, *nodes: int) -> Drafts:
            drafts = propose(batch, *nodes)
            self._seen = Seen(drafts, score(drafts, batch).survival)
            return drafts

        bound.propose, bound.propose_tree = partial(seen, bound.propose), partial(seen, bound.propose_tree)
        return bound


def _requests(models: Models, settings: Settings, limits: Limits) -> list[Request]:
    """Returns one request a prompt, in the model's chat template if it has one.

    Raises:
        ValueError: a prompt is too long, with its number.
    """
    rows = encode_each(models.tokenizer, settings.prompts)
    for number, row in enumerate(rows, 1):
        if not 0 < len(row) <= limits.prompt_tokens:
            raise ValueError(f"prompt {number} has {len(row)} tokens: give 1 to {limits.prompt_tokens}")
    ends = models.model.generation_config.eos_token_id
    eos = frozenset([ends] if isinstance(ends, int) else ends or ())
    processors = settings.processors()
    return [
        Request(
            id=number,
            prompt=list(row),
            max_new_tokens=settings.new_tokens,
            eos=eos,
            seed=settings.seed + number,
            samples=settings.sample,
            processors=processors or None,
        )
        for number, row in enumerate(rows)
    ]
