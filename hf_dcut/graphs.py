"""`Graphs`: steps of fixed shapes, recorded once as CUDA graphs and replayed.

A step of a small model is mostly launches: hundreds of kernels, each shorter than it takes the host to ask for it. A
graph holds them all and is launched at once. It has one shape, so there is one for each pair of a number of requests B
and of packed tokens T (0: without drafts), and a step takes the smallest that holds it. Where a step chooses T by its
own drafts, there is one more for each B, which makes them, and those with a T begin behind it. All share one pool of
memory, and what goes in, logits, and drafts between two graphs are buffers that were there before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from tqdm.auto import tqdm

from hf_dcut.budget import positions
from hf_dcut.config import DCutConfig
from hf_dcut.drafting import FAULTS
from hf_dcut.fixed_step import FixedRow, FixedStep
from hf_dcut.memory import size
from hf_dcut.recording import Recorder, recorder_for
from hf_dcut.requests import Request, table_of
from hf_dcut.trial import TOLERANCE, relative_difference
from hf_dcut.types import Drafts

logger = logging.getLogger(__name__)

# B requests and T packed tokens; T = 0 is the plain step.
Shape = tuple[int, int]

# New tokens of a request from which "auto" records graphs. A guess: recording has not been timed.
_WORTH = 128


@dataclass(frozen=True)
class Inputs:
    """What graphs of B requests read, in places that stay.

    Attributes:
        columns: int64 [6, B], the requests.
        menu: float64 [3, C], budgets to choose from; C = 0 where no step chooses.
        drafts: from the graph that makes them to those behind it; None where every graph makes its own.
    """

    columns: Tensor
    menu: Tensor
    drafts: Drafts | None


class Graphs:
    """Recorded steps by shape.

    Args:
        step: what is recorded.
        shapes: (B, T) of each; B at most the slots there are.
        recorder: how it is recorded.
        choices: how many budgets a step chooses from by its own drafts; 0 where it is told its T.

    Raises:
        RuntimeError: something in the step cannot be recorded, or does something else when it is replayed.
    """

    def __init__(self, step: FixedStep, shapes: Sequence[Shape], recorder: Recorder, choices: int = 0):
        self.step, self.choices = step, choices
        self.inputs = {rows: self._inputs(rows) for rows in {rows for rows, _ in shapes}}
        self.drafting: dict[int, Callable[[], Tensor]] = {}
        self.replays: dict[Shape, Callable[[], FixedRow]] = {}
        self._told = False
        self._record(sorted(set(shapes), key=lambda shape: (max(shape), shape), reverse=True), recorder)

    def run(self, requests: Sequence[Request], total: int) -> FixedRow | None:
        """Returns the verified row of these requests; None where no shape holds them.

        Args:
            requests: those in slots 0 .. B-1, and nobody lies behind them.
            total: packed tokens wanted; 0 for a step without drafts.
        """
        shape = smallest(self.replays, len(requests), total)
        if shape is None:
            self._tell(len(requests), f"{total} packed tokens" if total else "no drafts")
            return None
        self.inputs[shape[0]].columns.copy_(table_of(requests, shape[0]), non_blocking=True)
        return self.replays[shape]().of(len(requests))

    def run_best(self, requests: Sequence[Request], menu: Callable[[int], Tensor]) -> tuple[FixedRow, int] | None:
        """Returns the verified row with the best budget for its drafts, and which that is; None where no shape fits.

        Args:
            requests: as in `run`.
            menu: gives the budgets for B rows, as `selecting.menu_of` writes them.
        """
        rows = min((b for b in self.drafting if b >= len(requests)), default=None)
        if rows is None:
            self._tell(len(requests), "drafts")
            return None
        inputs, budgets = self.inputs[rows], menu(rows)
        inputs.columns.copy_(table_of(requests, rows), non_blocking=True)
        inputs.menu.copy_(budgets, non_blocking=True)
        # The step's only host read before verification: one number.
        best = int(self.drafting[rows]())
        total = int(budgets[0, best])
        shape = smallest((s for s in self.replays if s[0] == rows), rows, total)
        if shape is None:
            self._tell(rows, f"{total} packed tokens")
            return None
        return self.replays[shape]().of(len(requests)), best

    def _inputs(self, rows: int) -> Inputs:
        columns = self.step.inputs(rows)
        menu = torch.ones(3, self.choices, dtype=torch.float64, device=columns.device)
        return Inputs(columns, menu, self.step.blank(rows) if self.choices else None)

    def _record(self, shapes: Sequence[Shape], recorder: Recorder) -> None:
        """Records the shapes, the largest first: what it leaves in the pool holds the smaller ones."""
        before, full = recorder.bytes(), 0
        bar = tqdm(shapes, desc="hf-dcut: recording CUDA graphs", unit="graph", disable=None, leave=False)
        for shape in bar:
            try:
                self._record_one(shape, recorder)
            except torch.OutOfMemoryError:
                full += 1
        self.step.forget()
        taken = size(max(0, recorder.bytes() - before))
        logger.info("recorded %d CUDA graphs, which take %s", len(self.replays) + len(self.drafting), taken)
        if full:
            logger.warning(
                "memory holds %d of %d CUDA graphs: steps of other shapes run eagerly, the output is the same. Lower "
                "max_batch_size, or give fewer cuda_graph_batch_sizes",
                *(len(self.replays), len(shapes)),
            )

    def _record_one(self, shape: Shape, recorder: Recorder) -> None:
        """Records and tries a shape, and before the first of a B with drafts what makes them, if it is apart."""
        (rows, total), inputs = shape, self.inputs[shape[0]]
        if total and inputs.drafts is not None and rows not in self.drafting:
            draft = partial(self.step.draft, inputs.columns, inputs.menu, inputs.drafts)
            self.drafting[rows] = recorder.record(draft)
        replay = recorder.record(partial(self.step, inputs.columns, total, inputs.drafts))
        self._check(shape, replay)
        self.replays[shape] = replay

    def _check(self, shape: Shape, replay: Callable[[], FixedRow]) -> None:
        """Raises RuntimeError unless a replay on other inputs gives what the step itself does, after each anchor."""
        (rows, total), inputs = shape, self.inputs[shape[0]]
        columns = inputs.columns
        empty = columns.clone()
        # Columns 1 and 2 are lengths and anchors. Drafts may differ where two are equally likely.
        number = torch.arange(rows, device=columns.device)
        columns[1], columns[2] = number % 2, (number + 1) % self.step.target.vocabulary
        row = self.step(columns, total, inputs.drafts)
        anchor = row.packed.start[:-1].long()
        expected = row.logits[anchor]
        difference = relative_difference(replay().logits[anchor], expected)
        columns.copy_(empty)
        if not difference <= TOLERANCE[expected.dtype]:
            raise RuntimeError(
                f"a replayed step of {rows} requests gives other logits than the step itself (relative difference "
                f"{difference:.1e}): it keeps something that changes between steps"
            )

    def _tell(self, requests: int, kind: str) -> None:
        """Says, once, that a step runs eagerly since no shape holds it."""
        if not self._told:
            logger.warning(
                "no CUDA graph for steps of %d requests with %s: they run eagerly, the output is the same. "
                "cuda_graph_batch_sizes says what is recorded",
                *(requests, kind),
            )
        self._told = True


def smallest(shapes: Iterable[Shape], requests: int, total: int) -> Shape | None:
    """Returns the smallest shape that holds so many requests and packed tokens; None where there is none.

    Args:
        shapes: to choose from.
        requests: B. Those that are spare take one place of the row each.
        total: T; 0 for a step without drafts, which takes no other.
    """
    fits = (s for s in shapes if s[0] >= requests and (s[1] >= total + s[0] - requests if total else s[1] == 0))
    return min(fits, default=None)


def open_graphs(
    config: DCutConfig, step: FixedStep, batch_sizes: Collection[int], slots: int, new_tokens: int
) -> Graphs | None:
    """Returns the graphs of a call; None where it has none.

    Args:
        config: whether they are wanted, and the budgets they are for.
        step: what is recorded.
        batch_sizes: numbers of requests, unless the config has its own.
        slots: requests there can be at once.
        new_tokens: most tokens of a request, by which "auto" tells whether recording pays.

    Raises:
        ValueError: they are asked for where there can be none.
        RuntimeError: they are asked for, and a step cannot be recorded.
    """
    asked = config.cuda_graphs is True
    if not asked and (config.cuda_graphs is False or new_tokens < _WORTH):
        return None
    recorder, reason = recorder_for(step.target.device), _reason_against(config, step)
    if recorder is None:
        reason = f"they need a CUDA device, and the target is on {step.target.device}"
    if recorder is None or reason is not None:
        if asked:
            raise ValueError(f"dcut cuda_graphs=True: {reason}. Give 'auto' or False")
        logger.info("no CUDA graphs: %s", reason)
        return None
    sizes = [b for b in config.cuda_graph_batch_sizes or batch_sizes if b <= slots]
    shapes = [(b, t) for b in sizes for t in {0, *_totals(config, b, step.depth)}]
    try:
        return Graphs(step, shapes, recorder, choices_of(config, step.depth))
    except FAULTS as error:
        what = f"a step cannot be recorded ({type(error).__name__}: {error})"
        if asked:
            raise RuntimeError(f"dcut cuda_graphs=True: {what}. Give 'auto' or False") from error
        logger.warning("no CUDA graphs: %s. Steps run eagerly, the output is the same", what)
        return None


def choices_of(config: DCutConfig, depth: int) -> int:
    """Returns how many budgets a recorded step chooses from by its own drafts; 0 where it is told its T."""
    ratios = config.candidates(recorded=True)
    return len(ratios) if depth and len(ratios) > 1 and config.cuda_graph_budget == "read" else 0


def _totals(config: DCutConfig, rows: int, depth: int) -> set[int]:
    """Returns the packed tokens that budgets stand for, of drafted steps of so many requests."""
    return {positions(ratio, rows, depth) for ratio in config.candidates(recorded=True) if depth}


def _reason_against(config: DCutConfig, step: FixedStep) -> str | None:
    """Returns why steps of a call cannot be recorded; None if they can."""
    if config.proposals == "sampled":
        return "with proposals='sampled' each request's own options take part in drafting"
    if step.drafter is not None and not step.drafter.capturable:
        return f"{type(step.drafter).__name__} reads numbers on the host while it drafts"
    if step.target.ranks.size > 1:
        return "processes that share a model ask each other at every step"
    if step.cache.recurrent:
        return "the states of recurrent layers take in accepted tokens once the host knows how many"
    return None
