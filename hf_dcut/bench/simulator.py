"""The replay: the engine itself on recorded answers, priced by any cost table. No model, seconds instead of hours.

Scheduling, selection, acceptance and commit are the engine's own. Only what would run on the device is replaced: a
target that says what was recorded, a cache that holds that instead of K/V, a drafter that is as sure and as right as it
was. So a replay takes exactly the steps of a run, which the tests hold it to; an estimate are only the seconds
of each step: C(B, T) of a drafted one, the plain step's, and so much for every prompt token read along.

Tokens are made up: 1 goes on, 2 ends the answer, 0 is a wrong draft, and request i has a prompt of tokens 3 + i, by
which it is known. Methods that draft trees take recordings of trees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from hf_dcut.bench.methods import TREE, check_method
from hf_dcut.bench.policies import limited, rule_of
from hf_dcut.bench.trace import Trace
from hf_dcut.cache import SlotCache
from hf_dcut.config import RATIOS, DCutConfig
from hf_dcut.cost_table import CostTable
from hf_dcut.drafters.base import BoundDrafter
from hf_dcut.drafters.wrapping import BoundWrapped
from hf_dcut.engine import Engine
from hf_dcut.requests import Request
from hf_dcut.stats import Stats, StepRecord
from hf_dcut.target import Target
from hf_dcut.types import Batch, Committed, Drafts, Packed, Verdict

_WRONG, _ON, _END, _PROMPT = 0, 1, 2, 3


@dataclass(frozen=True)
class Replayed:
    """What a method would have done.

    Attributes:
        stats: of the steps, with a record of each; its seconds are those of the replay, not of the device.
        step_seconds: of each record, priced.
        steps: decoding steps of each request.
    """

    stats: Stats
    step_seconds: list[float]
    steps: list[int]

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return sum(self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        """New tokens over them."""
        return self.stats.new_tokens / self.seconds


def replay(
    traces: Sequence[Trace],
    slots: int,
    method: str,
    costs: CostTable,
    believed: CostTable | None = None,
    reading: float = 0.0,
    draft_tokens: int | None = None,
    ratios: Sequence[float] = RATIOS,
) -> Replayed:
    """Returns what a method would do with recorded requests, so many at once, and how long it would take.

    Args:
        traces: the requests, in order; a finished one is replaced by the next.
        slots: how many run at once.
        method: as in `policies.rule_of`; with "tree-" before it the traces are those of trees.
        costs: seconds of steps.
        believed: what "auto" chooses by; the same when None.
        reading: seconds of a prompt token.
        draft_tokens: D, or nodes of a tree, at most the traces' own.
        ratios: shares that "auto" chooses from.

    Raises:
        ValueError: an unknown method, no traces or those of other drafts, or a longer D than was recorded.
    """
    if not traces:
        raise ValueError("traces is empty: record some, see hf-dcut bench --record")
    depth = draft_tokens or traces[0].depth
    if depth > traces[0].depth:
        raise ValueError(f"draft_tokens={depth}: {traces[0].depth} were recorded, give at most that")
    check_method(method)
    tree = method.startswith(TREE)
    budget, policy = rule_of(method.removeprefix(TREE))
    if budget != "none" and tree != (traces[0].parent is not None):
        recorded = "chains" if tree else "trees"
        raise ValueError(f"method {method!r}: the traces are of {recorded}, {TREE} goes with those of trees")
    drafter: BoundDrafter = _RecordedDrafter(traces, slots, depth)
    if policy is not None:
        drafter = BoundWrapped(drafter, limited(policy, depth))
    length = max(trace.prompt_tokens + trace.max_new_tokens for trace in traces) + depth
    stats = Stats(records=[])
    engine = Engine(
        cast(Target, _RecordedTarget(traces)),
        cast(SlotCache, _RecordedCache(slots, length)),
        None if budget == "none" else drafter,
        depth,
        DCutConfig(budget=budget, ratios=tuple(ratios), deterministic=True),
        (believed or costs) if budget == "auto" else None,
        stats,
        tree=tree,
    )
    requests = [_request(number, trace) for number, trace in enumerate(traces)]
    for _ in engine.run(requests):
        pass
    assert stats.records is not None
    priced = [_price(record, costs, reading) for record in stats.records]
    return Replayed(stats, priced, [request.totals.steps for request in requests])


def _price(record: StepRecord, costs: CostTable, reading: float) -> float:
    """Returns the seconds of a step; prompt tokens come on top of it.

    Where the table has no plain step, it counts as a drafted one that keeps nothing, which is no shorter.
    """
    requests = len(record.requests)
    decoding = requests + sum(record.kept)
    seconds = reading * (record.total - decoding)
    if requests:
        plain = costs.plain(requests) if record.budget is None else math.inf
        seconds += plain if plain < math.inf else costs.drafted(requests, decoding)
    return seconds


def _request(number: int, trace: Trace) -> Request:
    prompt = [_PROMPT + number] * trace.prompt_tokens
    return Request(id=number, prompt=prompt, max_new_tokens=trace.max_new_tokens, eos=frozenset({_END}), seed=number)


def _answers(traces: Sequence[Trace]) -> Tensor:
    """Returns each request's answer, int64 [requests, longest + D]; -1 behind its end."""
    said = torch.full((len(traces), max(trace.tokens for trace in traces) + traces[0].depth + 1), -1)
    for row, trace in enumerate(traces):
        said[row, : trace.tokens] = _ON
        if trace.tokens < trace.max_new_tokens:
            said[row, trace.tokens - 1] = _END
    return said


class _RecordedCache:
    """Knows which request is in each slot, int64 [slots], where the real one has its K/V."""

    recurrent = False

    def __init__(self, slots: int, length: int):
        self.slots, self.length = slots, length
        self.holder = torch.zeros(slots, dtype=torch.int64)

    def move(self, source: int, destination: int) -> None:
        self.holder[destination] = self.holder[source]

    def copy(self, source: int, destination: int, length: int) -> None:
        """No two requests have the same prompt here, so none copies another's."""

    def free(self, slot: int) -> None:
        """Nothing is held that could be read again: a new prompt names its request."""

    def commit(self, verdict: Verdict, packed: Packed) -> None:
        """Accepted rows are where they should be, as in the real one."""


class _RecordedTarget:
    """Says the recorded answers: logits [L, 3] that are 1 at the token that follows."""

    device = torch.device("cpu")
    vocabulary = 3

    def __init__(self, traces: Sequence[Trace]):
        self.said = _answers(traces)
        self.prompt = torch.tensor([trace.prompt_tokens for trace in traces])

    def forward(self, packed: Packed, cache: _RecordedCache) -> tuple[Tensor, None]:
        first = packed.cell == 0
        cache.holder[packed.slot[first]] = packed.token[first] - _PROMPT
        slot, position = packed.slot[packed.logit_rows], packed.position[packed.logit_rows]
        request = cache.holder[slot]
        # Behind an answer's end anything may be said: nothing of it is committed.
        following = self.said[request, position + 1 - self.prompt[request]].clamp_min(_ON)
        return torch.nn.functional.one_hot(following, self.vocabulary).float(), None


class _RecordedDrafter(BoundDrafter):
    """As sure as the recorded drafts and right as often; it too knows a request by its prompt."""

    def __init__(self, traces: Sequence[Trace], slots: int, depth: int):
        self.said, self.depth = _answers(traces), depth
        self.prompt = torch.tensor([trace.prompt_tokens for trace in traces])
        self.holder = torch.zeros(slots, dtype=torch.int64)
        longest = max(1, *(len(trace.offered) for trace in traces))
        shape = (len(traces), longest, traces[0].depth)
        self.confidence, self.right = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
        self.place, self.offered = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape[:2], dtype=torch.int64)
        self.parent = torch.full(shape, -1)
        for row, trace in enumerate(traces):
            steps = len(trace.offered)
            self.confidence[row, :steps], self.right[row, :steps] = trace.confidence, trace.right
            self.place[row, :steps], self.offered[row, :steps] = trace.place, trace.offered
            if trace.parent is not None:
                self.parent[row, :steps] = trace.parent
        self.tree = traces[0].parent is not None

    def observe(self, committed: Committed) -> None:
        first = committed.cell == 0
        self.holder[committed.slot[first]] = committed.token[first] - _PROMPT

    def propose(self, batch: Batch) -> Drafts:
        request = self.holder[: len(batch)]
        row = batch.length - self.prompt[request]
        right, place, confidence, parent = (
            column[request, row, : self.depth] for column in (self.right, self.place, self.confidence, self.parent)
        )
        truth = self.said[request[:, None], row[:, None] + 1 + place].clamp_min(_ON)
        count = self.offered[request, row].clamp_max(self.depth)
        return Drafts(torch.where(right, truth, _WRONG), count, confidence, parent if self.tree else None)

    def move(self, source: int, destination: int) -> None:
        self.holder[destination] = self.holder[source]

    def copy(self, source: int, destination: int, length: int) -> None:
        """As in `_RecordedCache`."""

    def free(self, slot: int) -> None:
        """As in `_RecordedCache`."""
