"""Other ways to cut, for comparison: uniform depth, fixed capacity, a confidence threshold.

A policy says how many drafts of each request are verified. Put behind a drafter (`drafters/wrapping.py`) it leaves only
those, which the engine then verifies all: so a policy runs in the live engine and in the replay alike, and the engine
knows of none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_dcut.budget import cut
from hf_dcut.drafters.wrapping import Change
from hf_dcut.scores import score
from hf_dcut.types import Batch, Drafts, Scores

# Drafts that are kept of each request, int64 [B], a prefix of it.
Policy = Callable[[Scores], Tensor]


@dataclass(frozen=True)
class Uniform:
    """The same depth for every request, whatever the drafter says.

    Attributes:
        depth: drafts of each request.
    """

    depth: int

    def __call__(self, scores: Scores) -> Tensor:
        """Returns the depth, or what there is of it."""
        return scores.valid.sum(1).clamp_max(self.depth)


@dataclass(frozen=True)
class Capacity:
    """A fixed number of positions a step for the whole batch, the likeliest first (TETRIS, arXiv 2502.15197).

    Attributes:
        positions: packed tokens of a step, anchors included.
    """

    positions: int

    def __call__(self, scores: Scores) -> Tensor:
        """Returns the best prefixes that fit."""
        rows, depth = scores.survival.shape
        share = self.positions / (rows * (depth + 1))
        return cut(scores, (min(1.0, share),)).keep.sum(1)


@dataclass(frozen=True)
class Threshold:
    """Each request alone: its drafts up to the first that is less likely to survive than a fixed probability.

    Attributes:
        survival: the least probability to be committed.
    """

    survival: float

    def __call__(self, scores: Scores) -> Tensor:
        """Returns how many drafts reach the threshold."""
        return (scores.valid & (scores.survival >= self.survival)).sum(1)


# The default methods, as the paper names them: 1.0 is DFlash.
BUDGETS = ("1.0", "0.25", "0.5", "0.75", "auto")

_KINDS: dict[str, Callable[[str], Policy]] = {
    "uniform": lambda text: Uniform(_count(text)),
    "tetris": lambda text: Capacity(_count(text)),
    "threshold": lambda text: Threshold(_share(text)),
}


def rule_of(method: str) -> tuple[float | str, Policy | None]:
    """Returns the budget and the policy that a method of ours stands for.

    Args:
        method: "plain" (no drafts), "auto", a budget in (0, 1], or a policy: "uniform-3" (drafts a request),
            "tetris-64" (positions a step), "threshold-0.3" (least survival).

    Raises:
        ValueError: anything else.
    """
    if method in ("plain", "auto"):
        return ("none" if method == "plain" else "auto"), None
    kind, dash, number = method.partition("-")
    try:
        if dash and kind in _KINDS:
            return 1.0, _KINDS[kind](number)
        budget = _share(method)
        if budget:
            return budget, None
    except ValueError:
        pass
    raise ValueError(
        f"method {method!r}: give plain, auto, a budget in (0, 1], or a policy such as uniform-3 (drafts a request), "
        "tetris-64 (positions a step) or threshold-0.3 (least probability to survive)"
    )


def _count(text: str) -> int:
    """Returns a positive integer; raises ValueError for anything else."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _share(text: str) -> float:
    """Returns a number in [0, 1]; raises ValueError for anything else."""
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError
    return value


def limited(policy: Policy, depth: int) -> Change:
    """Returns the function that leaves of drafts what a policy keeps of the first `depth`."""

    def change(drafts: Drafts, batch: Batch) -> Drafts:
        drafts = drafts.first(depth)
        scores = score(drafts, batch)
        if not bool(torch.isfinite(scores.survival).all()):
            return drafts  # the engine drops them and says why
        return replace(drafts, count=policy(scores))

    return change
