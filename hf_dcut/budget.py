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

from hf_dcut.kernels import gains, ranks
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
    survival, valid = scores.survival, scores.valid
    rank = ranks(survival, valid)
    limits = [positions(ratio, rows, depth) - rows for ratio in ratios]
    gain = gains(survival, valid, rank, torch.tensor(limits, device=rank.device))
    finite = torch.where(valid, survival, 0.0).isfinite().all()
    # The step's only host read before verification: the candidates' gains, and how many drafts there are.
    *expected, ranked = torch.cat([gain, valid.sum(1), finite[None]]).tolist()
    gained, offered = expected[: len(ratios)], tuple(map(int, expected[len(ratios) :]))
    if not ranked:
        raise NonFiniteScores("the drafter's confidences are not finite")
    totals = [rows + min(limit, sum(offered)) for limit in limits]
    best = 0
    if len(ratios) > 1:
        assert costs is not None, "choosing between budgets needs a cost table"
        rates = [(rows + belief * gain) / costs(rows, total) for gain, total in zip(gained, totals, strict=True)]
        best = max(range(len(rates)), key=rates.__getitem__)
    return Cut(valid & (rank < totals[best] - rows), totals[best], ratios[best], offered, gained[best])
