"""What recorded drafts say: how far acceptance varies, whether confidence predicts it, what a global cut gains."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_dcut.bench.cell import Ratio
from hf_dcut.bench.simulator import replay
from hf_dcut.bench.trace import Trace
from hf_dcut.cost_table import CostTable

SHARES = (0.25, 0.5, 0.75)
_RESAMPLES = 1000


def accepted_lengths(trace: Trace) -> list[int]:
    """Returns the drafts accepted in each step when all are verified (the paper's figure 2a)."""
    return [int(trace.accepted[position]) for position in trace.visited()]


def draft_places(traces: Sequence[Trace]) -> tuple[Tensor, Tensor]:
    """Returns survival float32 [n] and acceptance bool [n] of every draft place of steps that verify all (figure 7)."""
    survivals, accepted = [], []
    for trace in traces:
        rows = torch.tensor(trace.visited(), dtype=torch.int64)
        place = torch.arange(trace.depth)
        # Behind the answer's end nothing can be accepted, whatever the drafter thinks.
        real = place < torch.minimum(trace.offered[rows], trace.tokens - 1 - rows)[:, None]
        survivals.append(trace.confidence[rows].cumprod(1)[real])
        accepted.append((place < trace.accepted[rows, None])[real])
    return torch.cat(survivals), torch.cat(accepted)


def spearman(x: Tensor, y: Tensor) -> float:
    """Returns the rank correlation of two columns [n]; ties share their mean rank."""
    return float(torch.corrcoef(torch.stack([_ranks(x), _ranks(y)]))[0, 1])


def auroc(score: Tensor, label: Tensor) -> float | None:
    """Returns how probable it is that a true place has the higher score, ties counting half; None with one class only.

    Args:
        score: float [n].
        label: bool [n].
    """
    true = int(label.sum())
    false = len(label) - true
    if not true or not false:
        return None
    return (float(_ranks(score)[label].sum()) - true * (true + 1) / 2) / (true * false)


@dataclass(frozen=True)
class EqualBudget:
    """Uniform depth against the global cut with as many positions a step.

    Attributes:
        share: of all positions.
        uniform, cut: mean accepted tokens of each.
        gain: of the cut over uniform depth.
    """

    share: float
    uniform: float
    cut: float
    gain: Ratio


def equal_budgets(traces: Sequence[Trace], batch: int) -> list[EqualBudget]:
    """Returns what the global cut gains at equal budgets, with bootstrap 95 % intervals over requests.

    Args:
        traces: the requests.
        batch: B, requests at once.
    """
    depth = traces[0].depth
    found = []
    for share in SHARES:
        kept = max(1, round(share * (depth + 1)) - 1)
        steps = [
            torch.tensor(replay(traces, batch, method, _ONE).steps).double()
            for method in (f"uniform-{kept}", str((kept + 1) / (depth + 1)))
        ]
        # The first token of an answer comes with its prompt.
        tokens = sum(trace.tokens - 1 for trace in traces)
        uniform, cut = (tokens / float(s.sum()) for s in steps)
        found.append(EqualBudget((kept + 1) / (depth + 1), uniform, cut, _gain(*steps)))
    return found


# Steps are counted, not timed.
_ONE = CostTable.from_rows({1: {0: 1.0, 1: 1.0}}, 1)


def _gain(uniform: Tensor, cut: Tensor) -> Ratio:
    """Returns the ratio of summed steps, float64 [requests] each, with its interval."""
    dice = random.Random(0)
    rows = range(len(cut))
    drawn = [torch.tensor(dice.choices(rows, k=len(cut))) for _ in range(_RESAMPLES)]
    ratios = sorted(float(uniform[d].sum() / cut[d].sum()) for d in drawn)
    edge = round(0.025 * _RESAMPLES)
    return Ratio(float(uniform.sum() / cut.sum()), ratios[edge], ratios[-edge - 1])


def _ranks(values: Tensor) -> Tensor:
    """Returns ranks from 1, float64 [n]; equal values share their mean."""
    _, inverse, counts = values.double().unique(return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    return (ends - (counts - 1) / 2)[inverse]
