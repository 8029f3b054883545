"""Selection on the device: confidences in, keep depths and the packed row out, without a host read.

What `scores.py`, `budget.py` and `packing.py` do one after the other, in tensors of fixed shape. They call the parts of
this file; `select` is all three at once, the twin of the fused kernel. Every number is the same on every device, bit
for bit: products are taken in float64 from left to right and rounded once, sums of survivals are sums of integers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Survivals are added as integer multiples of this: the order does not matter, and 8192 of them fit a float64 exactly.
QUANTUM = 2.0**-40


class Selected(NamedTuple):
    """The cut and its packed row, whose places from the chosen total on are spare.

    Attributes:
        keep: bool [B, D], drafts that stay: a prefix of each row.
        columns: int64 [6, B (D+1)], token, slot, cell, position, node and number of each packed row. Spare places
            hold the last request's anchor and belong to no request.
        start: int32 [B+1], where each request begins.
        used: int32 [B], cells of its slot in use once the row is stored.
        numbers: int64 [4+B], index of the chosen budget, packed tokens, whether all survivals are finite, the sum of
            those that stay in multiples of `QUANTUM`, and the drafts that each request offered.
    """

    keep: Tensor
    columns: Tensor
    start: Tensor
    used: Tensor
    numbers: Tensor


def select(
    confidence: Tensor,
    token: Tensor,
    count: Tensor,
    room: Tensor,
    anchor: Tensor,
    slot: Tensor,
    length: Tensor,
    rope: Tensor,
    budgets: Tensor,
    curve: Tensor,
    belief: Tensor,
) -> Selected:
    """Returns the cut with the most expected tokens a second, and its packed row.

    Args:
        confidence: float [B, D], of each draft given that those before it hold.
        token: int64 [B, D].
        count, room: int64 [B], drafts that are real, and that fit.
        anchor, slot, length, rope: int64 [B], as in `Batch`.
        budgets: int64 [C], packed tokens to choose from, each at least B. Equal rates: the first.
        curve: float64 [2, P], rising packed tokens and the seconds of a step there; see `interpolate`.
        belief: float64 [1], what survivals are scaled by for the choice.
    """
    (rows, depth), device = confidence.shape, confidence.device
    offered = torch.minimum(count, room).clamp(0, depth)
    valid = torch.arange(depth, device=device) < offered[:, None]
    survival = survivals(confidence, valid)
    rank = ranks(survival, valid)
    totals = torch.minimum(budgets, rows + offered.sum())
    gain = gains(survival, valid, rank, totals - rows)
    rate = (rows + belief * gain) / interpolate(curve, totals)
    index = torch.arange(len(budgets), device=device)
    # Of one place, not of none: an index without dimensions would be read on the host.
    best = torch.where(rate == rate.max(), index, len(budgets) - 1).amin(0, keepdim=True)
    total = totals[best]
    keep = valid & (rank < total - rows)
    columns, start, used = lay_out(token, keep.sum(1), anchor, slot, length, rope, rows * (depth + 1))
    finite = torch.where(valid, survival, 0.0).isfinite().all()
    promised = (gain[best] / QUANTUM).long()
    return Selected(keep, columns, start, used, torch.cat([best, total, finite.long()[None], promised, offered]))


def survivals(confidence: Tensor, valid: Tensor) -> Tensor:
    """Returns the products of confidences along each row, float32 [B, D], which never rise; 0 where not valid.

    NaN from the first non-finite confidence of a row on.

    Args:
        confidence: float [B, D], taken into [0, 1].
        valid: bool [B, D], a prefix of each row.
    """
    confidence = confidence.double()
    confidence = torch.where(confidence.isfinite(), confidence.clamp(0.0, 1.0), torch.nan)
    # A device may multiply in another order than from left to right, so that a product rises by rounding.
    product, _ = torch.where(valid, confidence, 0.0).cumprod(1).float().cummin(1)
    return product


def ranks(survival: Tensor, valid: Tensor) -> Tensor:
    """Returns how many valid drafts go before each draft, int64 [B, D]; those that are not valid come last.

    Equal survivals are ranked shallow first, then by request: the stable sort keeps the depth-major order
    (0, 0), (1, 0), .., (B-1, 0), (0, 1), .. among them, so a tie never separates a draft from its prefix.

    Args:
        survival: float32 [B, D].
        valid: bool [B, D].
    """
    rows, depth = survival.shape
    order = torch.where(valid, survival, -1.0).T.flatten().argsort(descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(rows * depth, device=order.device))
    return rank.view(depth, rows).T


def gains(survival: Tensor, valid: Tensor, rank: Tensor, limits: Tensor) -> Tensor:
    """Returns the survivals of the best drafts added up, for several numbers of them, float64 [C].

    Args:
        survival, valid, rank: as above.
        limits: int64 [C], how many drafts are taken.
    """
    parts = torch.where(valid, survival.double() / QUANTUM, 0.0).long()
    return torch.where(rank < limits[:, None, None], parts, 0).sum((1, 2)).double() * QUANTUM


def interpolate(curve: Tensor, totals: Tensor) -> Tensor:
    """Returns seconds, float64 [C]: linear between the points of a curve, constant before the first and after the last.

    Args:
        curve: float64 [2, P], rising packed tokens, and seconds.
        totals: int64 [C].
    """
    points, seconds = curve
    right = torch.searchsorted(points, totals.double()).clamp(min(1, len(points) - 1), len(points) - 1)
    left = (right - 1).clamp_min(0)
    width = points[right] - points[left]
    share = torch.where(width > 0, (totals - points[left]) / width, 0.0).clamp(0.0, 1.0)
    return seconds[left] + share * (seconds[right] - seconds[left])


def lay_out(
    token: Tensor, kept: Tensor, anchor: Tensor, slot: Tensor, length: Tensor, rope: Tensor, places: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns columns int64 [6, places], start int32 [B+1] and used int32 [B] of a packed row, as in `Selected`.

    With kept = [2, 0, 3] the row is a0 a1 a2 b0 c0 c1 c2 c3 and start is [0, 3, 4, 8]. Places past its end repeat c0.

    Args:
        token: int64 [B, D].
        kept: int64 [B], drafts kept of each row.
        anchor, slot, length, rope: int64 [B].
        places: packed rows to fill in.
    """
    start = torch.nn.functional.pad((kept + 1).cumsum(0), (1, 0))
    place = torch.arange(places, device=kept.device)
    row = torch.searchsorted(start[1:], place, right=True).clamp_max(len(kept) - 1)
    offset = torch.where(place < start[-1], place - start[row], 0)
    own = torch.cat([anchor[:, None], token], dim=1)[row, offset]
    cell = length[row] + offset
    columns = torch.stack([own, slot[row], cell, cell + rope[row], offset - 1, place])
    return columns, start.int(), (length + kept + 1).int()
