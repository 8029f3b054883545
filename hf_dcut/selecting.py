"""Drafts -> Packed and Cut by one kernel: `scores.py`, `budget.py` and `packing.py` at once, with one host read.

The budget is chosen on the device, from the cost table's points; what comes back is the same as from the three stages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_dcut.budget import NonFiniteScores, positions
from hf_dcut.cost_table import CostTable
from hf_dcut.kernels import QUANTUM, select
from hf_dcut.packing import as_packed
from hf_dcut.types import Batch, Cut, Drafts, Packed


def select_at_once(
    drafts: Drafts,
    batch: Batch,
    ratios: Sequence[float],
    costs: CostTable | None,
    reach: int,
    belief: float = 1.0,
    path: str | None = None,
) -> tuple[Packed, Cut]:
    """Returns the packed row of the best cut, and the cut.

    Args:
        drafts: chains of D drafts a request.
        batch: the requests.
        ratios: budgets to choose from.
        costs: seconds of steps; needed to choose between several ratios.
        reach: cells that any request can use after the step.
        belief: what survivals are scaled by for the choice.
        path: "triton" or "reference"; None for the device's own.

    Raises:
        NonFiniteScores: the drafts cannot be ranked.
    """
    (rows, depth), device = drafts.token.shape, drafts.token.device
    assert costs is not None or len(ratios) == 1, "choosing between budgets needs a cost table"
    points, seconds = costs.curve(rows) if costs is not None and len(ratios) > 1 else ([0.0], [1.0])
    budgets = torch.tensor([positions(ratio, rows, depth) for ratio in ratios]).to(device, non_blocking=True)
    curve = torch.tensor([points, seconds], dtype=torch.float64).to(device, non_blocking=True)
    scale = torch.tensor([belief], dtype=torch.float64).to(device, non_blocking=True)
    row = (batch.anchor, batch.slot, batch.length, batch.rope)
    chosen = select(drafts.confidence, drafts.token, drafts.count, batch.room, *row, budgets, curve, scale, path=path)
    # The step's only host read before verification.
    best, total, finite, promised, *offered = chosen.numbers.tolist()
    if not finite:
        raise NonFiniteScores("the drafter's confidences are not finite")
    packed = as_packed(chosen.columns[:, :total], chosen.start, chosen.used, depth, reach)
    return packed, Cut(chosen.keep, total, ratios[best], tuple(offered), promised * QUANTUM)
