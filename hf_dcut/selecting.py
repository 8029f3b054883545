"""Drafts -> Packed and Cut: `scores.py`, `budget.py` and `packing.py`, one after the other or in one kernel.

`select` takes the budget with the most expected tokens a second, which costs one host read. For steps of fixed shape
that is two functions which read nothing: `choose_fixed` says which budget is the best, and `select_fixed` fills a given
number of places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hf_dcut import kernels
from hf_dcut.budget import NonFiniteScores, cut, positions
from hf_dcut.cost_table import CostTable
from hf_dcut.kernels import QUANTUM, Selected, select_path
from hf_dcut.packing import as_packed, pack
from hf_dcut.scores import score, usable
from hf_dcut.types import Batch, Cut, Drafts, Packed


def select(
    drafts: Drafts, batch: Batch, ratios: Sequence[float], costs: CostTable | None, reach: int, belief: float = 1.0
) -> tuple[Packed, Cut]:
    """Returns the packed row of the best cut, and the cut, by whatever is fastest on the device.

    Args:
        drafts: up to D drafts a request.
        batch: the requests.
        ratios: budgets to choose from.
        costs: seconds of steps; needed to choose between several ratios.
        reach: cells that any request can use after the step.
        belief: what survivals are scaled by for the choice: how far the drafts' confidences held so far.

    Raises:
        NonFiniteScores: the drafts cannot be ranked.
    """
    if select_path(drafts.token.device, *drafts.token.shape) != "reference":
        return select_at_once(drafts, batch, ratios, costs, reach, belief)
    seconds = partial(costs.drafted, kv_length=reach) if costs else None
    chosen = cut(score(drafts, batch), ratios, seconds, belief)
    return pack(drafts, chosen, batch, reach), chosen


def select_at_once(
    drafts: Drafts,
    batch: Batch,
    ratios: Sequence[float],
    costs: CostTable | None,
    reach: int,
    belief: float = 1.0,
    path: str | None = None,
) -> tuple[Packed, Cut]:
    """Returns the same from one kernel, which chooses the budget from the cost table's points.

    Args:
        drafts, batch, ratios, costs, reach, belief: as in `select`.
        path: "triton" or "reference"; None for the device's own.

    Raises:
        NonFiniteScores: the drafts cannot be ranked.
    """
    (rows, depth), device = drafts.token.shape, drafts.token.device
    assert costs is not None or len(ratios) == 1, "choosing between budgets needs a cost table"
    points, seconds = costs.curve(rows, reach) if costs is not None and len(ratios) > 1 else ([0.0], [1.0])
    budgets = torch.tensor([positions(ratio, rows, depth) for ratio in ratios]).to(device, non_blocking=True)
    curve = torch.tensor([points, seconds], dtype=torch.float64).to(device, non_blocking=True)
    scale = torch.tensor([belief], dtype=torch.float64).to(device, non_blocking=True)
    row = (batch.anchor, batch.slot, batch.length, batch.rope)
    given = (drafts.confidence, drafts.token, drafts.count, batch.room, *row, budgets, curve, scale)
    chosen = kernels.select(*given, path=path)
    # The step's only host read before verification.
    best, total, finite, promised, *offered = chosen.numbers.tolist()
    if not finite:
        raise NonFiniteScores("the drafter's confidences are not finite")
    packed = as_packed(chosen.columns[:, :total], chosen.start, chosen.used, depth, reach)
    return packed, Cut(chosen.keep, total, ratios[best], tuple(offered), promised * QUANTUM)


def select_fixed(drafts: Drafts, batch: Batch, total: int, reach: int, path: str | None = None) -> Packed:
    """Returns a packed row of exactly `total` places: the anchors and the likeliest drafts. Reads nothing on the host.

    Drafts that are not there, beyond their request's room or without a finite confidence count as certain to fail, so
    they only fill up what would be padding. Their cells lie behind their request's; a token that the target did not
    choose is never accepted, and one past a request's end is never committed.

    Args:
        drafts: chains of D drafts a request; any token of the vocabulary where there is none.
        batch: the requests, each in the slot of its row, and with D cells behind its room.
        total: T, from B to B (D+1).
        reach: as in `select`.
        path: "triton" or "reference"; None for the device's own.
    """
    depth = drafts.token.shape[1]
    all_of_them = torch.full_like(drafts.count, depth)
    budget = torch.full_like(drafts.count[:1], total)
    curve = torch.arange(2.0, dtype=torch.float64, device=budget.device).view(2, 1)
    chosen = _selected(drafts, batch, all_of_them, all_of_them, budget, curve, curve[1], path)
    packed = as_packed(chosen.columns[:, :total], chosen.start, chosen.used, depth, reach)
    # No position beyond those that the request can come to: there may be no embedding for it.
    last = batch.length + batch.room.clamp_min(0) + batch.rope
    return replace(packed, position=packed.position.minimum(last[packed.slot]), fixed=True)


def menu_of(
    ratios: Sequence[float],
    costs: CostTable | None,
    requests: int,
    rows: int,
    depth: int,
    belief: float = 1.0,
    kv_length: int = 0,
) -> Tensor:
    """Returns what `choose_fixed` chooses from, float64 [3, C]: packed tokens, seconds, and a factor of survivals.

    A spare row adds its place to every budget, and none to the tokens that are expected: n + belief * gain of the n
    requests are, but for a factor, rows + belief * rows / n * gain.

    Args:
        ratios: budgets, rising.
        costs: seconds of steps; needed to choose between several ratios.
        requests: those that are somebody.
        rows: B, with those that are spare.
        depth: D.
        belief: as in `select`.
        kv_length: cells of the longest request.
    """
    assert costs is not None or len(set(ratios)) == 1, "choosing between budgets needs a cost table"
    totals = [positions(ratio, requests, depth) for ratio in ratios]
    seconds = [costs.drafted(requests, total, kv_length) if costs else 1.0 for total in totals]
    filled = [total + rows - requests for total in totals]
    return torch.tensor([filled, seconds, [belief * rows / requests] * len(ratios)], dtype=torch.float64)


def choose_fixed(drafts: Drafts, batch: Batch, menu: Tensor, path: str | None = None) -> Tensor:
    """Returns the index of the budget with the most expected tokens a second, int64 [1]. Reads nothing on the host.

    The budget is that of `select` for the same drafts, where the seconds of steps lie on a line between two budgets.

    Args:
        drafts: chains of D drafts a request; one without a finite confidence counts as certain to fail.
        batch: the requests.
        menu: from `menu_of`.
        path: as in `select_fixed`.
    """
    given = (drafts.count, batch.room, menu[0].long(), menu[:2], menu[2, :1])
    return _selected(drafts, batch, *given, path).numbers[:1]


def _selected(
    drafts: Drafts,
    batch: Batch,
    count: Tensor,
    room: Tensor,
    budgets: Tensor,
    curve: Tensor,
    belief: Tensor,
    path: str | None,
) -> Selected:
    """Returns the kernel's choice; drafts that are not there or cannot be ranked are certain to fail."""
    confidence = torch.where(usable(drafts, batch) & drafts.confidence.isfinite(), drafts.confidence, 0.0)
    row = (batch.anchor, batch.slot, batch.length, batch.rope)
    return kernels.select(confidence, drafts.token, count, room, *row, budgets, curve, belief, path=path)
