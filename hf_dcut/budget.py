"""Scores + costs -> Cut: which drafts of the batch are verified (the paper's equations 4 and 5).

All drafted positions of the batch compete for one budget of T positions, of which the B anchors are certain:

    T(rho, B) = max(B, ceil(rho B (D + 1)))
    rho*      = argmax over rho of (B + belief * sum of the best T - B survivals) / C(B, T)

The numerator is the expected number of tokens the step commits, so the quotient is tokens per second. Belief is 1 in
the paper; here it is how far the drafter's confidences held so far (`calibration.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_dcut.types import Cut, Scores

# Seconds of a drafted step of B requests and T packed tokens.
Costs = Callable[[int, int], float]


class NonFiniteScores(ArithmeticError):
    """The drafter gave NaN or infinite confidences; nothing can be ranked by them."""


def positions(ratio: float, requests: int, depth: int) -> int:
    """Returns T(rho, B), the packed tokens a budget stands for (equation 4).

    Args:
        ratio: rho in (0, 1], the share of all positions.
        requests: B.
        depth: D, drafts a request.
    """
    # The subtraction keeps a product like 0.1 * 3 * 10, a hair above 3 in floating point, from being rounded up to 4.
    return max(requests, math.ceil(ratio * requests * (depth + 1) - 1e-9))


def cut(scores: Scores, ratios: Sequence[float], costs: Costs | None = None, belief: float = 1.0) -> Cut:
    """Returns the best cut: exactly min(T, B + valid drafts) positions, a prefix of each request.

    Args:
        scores: survival float32 [B, N] and valid bool [B, N].
        ratios: the budgets to choose from. A single one is taken as it is.
        costs: seconds of a step, needed to choose between several ratios.
        belief: what survivals are scaled by for that choice.

    Raises:
        NonFiniteScores: a valid position has no finite survival.
    """
    rows, depth = scores.survival.shape
    totals = [positions(ratio, rows, depth) for ratio in ratios]
    survival, order = _rank(scores)
    # Expected drafts from the best 0, 1, 2, .. positions.
    expected = torch.cat([survival.new_zeros(1), survival.cumsum(0)])
    picked = expected[[min(t, rows + survival.numel()) - rows for t in totals]]
    # The step's only host read before verification: the gains of the candidates and how many drafts there are.
    numbers = torch.cat([picked, expected[-1:], scores.valid.sum(1)]).tolist()
    gains, everything, offered = (
        numbers[: len(ratios)],
        numbers[len(ratios)],
        tuple(map(int, numbers[len(ratios) + 1 :])),
    )
    if not math.isfinite(everything):
        raise NonFiniteScores("the drafter's confidences are not finite")
    totals = [min(t, rows + sum(offered)) for t in totals]
    best = 0
    if len(ratios) > 1:
        assert costs is not None, "choosing between budgets needs a cost table"
        rates = [(rows + belief * gain) / costs(rows, total) for gain, total in zip(gains, totals, strict=True)]
        best = max(range(len(rates)), key=rates.__getitem__)
    keep = torch.zeros_like(scores.valid).T.flatten()
    keep[order[: totals[best] - rows]] = True
    return Cut(keep.view(depth, rows).T, totals[best], ratios[best], offered, gains[best])


def _rank(scores: Scores) -> tuple[Tensor, Tensor]:
    """Returns survivals float32 [B*N], best first, and where they stand in the depth-major list, int64 [B*N].

    Equal survivals are ranked shallow first, then by request: the stable sort keeps the depth-major order
    (0, 0), (1, 0), .., (B-1, 0), (0, 1), .. among them, so a tie never separates a draft from its prefix. Invalid
    places rank last.
    """
    flat = torch.where(scores.valid, scores.survival, -1.0).T.flatten()
    flat, order = flat.sort(descending=True, stable=True)
    return flat.clamp_min(0.0), order
