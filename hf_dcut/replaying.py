"""`Replaying`: which steps of an engine are replayed, and the budget they are given.

A replayed step is one launch, so its budget cannot come from its own drafts. It comes from those of the last drafted
step: how sure a drafter is changes slowly from one step to the next. Which drafts fill the budget is still decided by
the step's own. Until a step has drafted, and in steps that read prompts, everything runs eagerly.

With `cuda_graph_budget="read"` a step is two launches, and the host reads one number in between: which budget its own
drafts call for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hf_dcut.budget import cut, positions
from hf_dcut.cost_table import CostTable
from hf_dcut.fixed_step import FixedRow
from hf_dcut.graphs import Graphs
from hf_dcut.kernels import survivals
from hf_dcut.requests import Request
from hf_dcut.selecting import menu_of
from hf_dcut.types import Cut, Scores, Verified


class Replaying:
    """The recorded steps of an engine, if it has any, and what the last drafted step would have called for.

    Args:
        graphs: the steps; None where all run eagerly.
        costs: seconds of steps; needed to choose between several budgets.
        depth: D.
    """

    def __init__(self, graphs: Graphs | None, costs: CostTable | None, depth: int):
        self.graphs, self.costs, self.depth = graphs, costs, depth
        self.ratio: float | None = None

    def run(self, requests: Sequence[Request], ratios: Sequence[float] | None, belief: float) -> Verified | None:
        """Returns what a recorded step says of the requests; None where the step must run eagerly.

        Args:
            requests: all that are live, in slots 0 .. B-1.
            ratios: budgets to choose from; None for a plain step.
            belief: what survivals are scaled by for the choice.
        """
        if self.graphs is None:
            return None
        if ratios and self.graphs.choices:
            row, ratio = self._best(self.graphs, requests, ratios, belief)
        else:
            row, ratio = self._told(self.graphs, requests, ratios)
        if row is None:
            return None
        return Verified(row.packed, None, None, row.logits, None, row.told, ratio, row.spare, row.likeliest)

    def _told(
        self, graphs: Graphs, requests: Sequence[Request], ratios: Sequence[float] | None
    ) -> tuple[FixedRow | None, float | None]:
        """Returns the row with a budget that was known before, if any was, and the budget."""
        if not ratios:
            return graphs.run(requests, 0), None
        ratio = ratios[0] if len(ratios) == 1 else self.ratio
        if ratio is None:
            return None, None
        return graphs.run(requests, positions(ratio, len(requests), self.depth)), ratio

    def _best(
        self, graphs: Graphs, requests: Sequence[Request], ratios: Sequence[float], belief: float
    ) -> tuple[FixedRow | None, float | None]:
        """Returns the row with the budget that its own drafts call for, and the budget."""
        # Of as many budgets as were recorded: a single one is measured as all of them.
        rising = sorted(ratios) if len(ratios) == graphs.choices else [ratios[0]] * graphs.choices
        longest = max(request.length for request in requests)

        def menu(rows: int) -> Tensor:
            return menu_of(rising, self.costs, len(requests), rows, self.depth, belief, longest)

        found = graphs.run_best(requests, menu)
        return (None, None) if found is None else (found[0], rising[found[1]])

    def saw(self, chosen: Cut) -> None:
        """Takes in the cut of a step that chose by its own drafts."""
        self.ratio = chosen.budget

    def read(self, row: Verified, ratios: Sequence[float] | None, belief: float) -> tuple[Cut | None, bool]:
        """Returns the cut of a step that is over, and whether all its drafts could be ranked; chooses the next budget.

        Args:
            row: of the step. What is told of it is read on the host here.
            ratios: budgets to choose from.
            belief: what survivals are scaled by for the choice.
        """
        if row.told is None or row.ratio is None:
            return row.cut, True
        told = row.told.cpu()
        confidence, count = told[:, :-1].float(), told[:, -1:]
        valid, finite = torch.arange(confidence.shape[1]) < count, confidence.isfinite()
        scores = Scores(survivals(torch.where(finite, confidence, 0.0), valid), valid)
        if ratios and len(ratios) > 1 and not (self.graphs and self.graphs.choices):
            assert self.costs is not None, "choosing between budgets needs a cost table"
            seconds = partial(self.costs.drafted, kv_length=row.packed.reach)
            self.ratio = cut(scores, ratios, seconds, belief).budget
        # Places that the budget left free were filled too. Each spare row took one.
        taken = cut(scores, ((len(row.packed) - row.spare) / told.numel(),))
        return replace(taken, budget=row.ratio), bool((finite | ~valid).all())
