"""`Curve`: what each budget promised in one step, and what it costs (the paper's equation 5).

tokens a second (T) = (B + sum of the best T - B survivals) / C(B, T)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_dcut.budget import positions
from hf_dcut.cost_table import CostTable


@dataclass(frozen=True, slots=True)
class Curve:
    """Both sides of a step's choice.

    Attributes:
        requests: B.
        totals: T, positions to verify, from B (no draft) up.
        tokens: expected tokens of the step for each T.
        seconds: C(B, T) of each T.
        plain: seconds of a step without drafts.
        candidates: (share, T) of each budget there is to choose from.
        chosen: T of the step.
    """

    requests: int
    totals: tuple[int, ...]
    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    plain: float
    candidates: tuple[tuple[float, int], ...]
    chosen: int

    @property
    def rates(self) -> tuple[float, ...]:
        """Expected tokens a second of each T."""
        return tuple(tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True))

    @property
    def plain_rate(self) -> float:
        """Tokens a second of plain steps."""
        return self.requests / self.plain

    def at(self, total: int) -> int:
        """Returns where T stands in the lists; the last place for larger ones."""
        return min(max(0, total - self.totals[0]), len(self.totals) - 1)


def curve_of(
    survival: Sequence[float],
    requests: int,
    depth: int,
    ratios: Sequence[float],
    chosen: int,
    costs: CostTable,
    kv_length: int = 0,
) -> Curve:
    """Returns the curve of one step.

    Args:
        survival: of all drafts of the batch.
        requests: B.
        depth: D.
        ratios: budgets there are to choose from.
        chosen: T of the step.
        costs: seconds of steps.
        kv_length: cells of the longest request.
    """
    tokens = [float(requests)]
    for value in sorted(survival, reverse=True):
        tokens.append(tokens[-1] + value)
    totals = tuple(range(requests, requests + len(tokens)))
    return Curve(
        requests=requests,
        totals=totals,
        tokens=tuple(tokens),
        seconds=tuple(costs.drafted(requests, total, kv_length) for total in totals),
        plain=costs.plain(requests, kv_length),
        candidates=tuple((ratio, min(positions(ratio, requests, depth), totals[-1])) for ratio in ratios),
        chosen=chosen,
    )
