"""`Graphs`: steps of fixed shapes, recorded once as CUDA graphs and replayed.

A step of a small model is mostly launches: hundreds of kernels, each shorter than it takes the host to ask for it. A
graph holds them all and is launched at once. It has one shape, so there is one for each pair of a number of requests B
and of packed tokens T (0: without drafts), and a step takes the smallest that holds it. All share one pool of memory,
and their inputs and logits are buffers that were there before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
from tqdm.auto import tqdm

from hf_dcut.budget import positions
from hf_dcut.config import DCutConfig
from hf_dcut.drafting import FAULTS
from hf_dcut.fixed_step import FixedRow, FixedStep
from hf_dcut.memory import size
from hf_dcut.requests import Request, table_of
from hf_dcut.trial import TOLERANCE, relative_difference

logger = logging.getLogger(__name__)

# B requests and T packed tokens; T = 0 is the plain step.
Shape = tuple[int, int]

# New tokens of a request from which "auto" records graphs. A guess: recording has not been timed.
_WORTH = 128


class Recorder(Protocol):
    """Records what a function does on the device, so that it can be done again."""

    def record(self, run: Callable[[], FixedRow]) -> Callable[[], FixedRow]:
        """Returns a function that does the same to the same memory, and returns the same tensors, filled anew."""

    def bytes(self) -> int:
        """Returns the memory that the device holds by now."""


class CudaRecorder:
    """Records CUDA graphs into one memory pool.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], FixedRow]) -> Callable[[], FixedRow]:
        """Returns the replay. What a first run allocates, compiles or tunes, it does before the recording."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                run()
        current.wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            row = run()

        def replay() -> FixedRow:
            graph.replay()
            return row

        return replay

    def bytes(self) -> int:
        """Returns what the allocator has taken from the device."""
        return torch.cuda.memory_reserved(self.device)


class Graphs:
    """Recorded steps by shape.

    Args:
        step: what is recorded.
        shapes: (B, T) of each; B at most the slots there are.
        recorder: how it is recorded.

    Raises:
        RuntimeError: something in the step cannot be recorded, or does something else when it is replayed.
    """

    def __init__(self, step: FixedStep, shapes: Sequence[Shape], recorder: Recorder):
        self.step = step
        self.columns = {rows: step.inputs(rows) for rows, _ in shapes}
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
            self._tell(len(requests), total)
            return None
        self.columns[shape[0]].copy_(table_of(requests, shape[0]), non_blocking=True)
        return self.replays[shape]().of(len(requests))

    def _record(self, shapes: Sequence[Shape], recorder: Recorder) -> None:
        """Records the shapes, the largest first: what it leaves in the pool holds the smaller ones."""
        before, full = recorder.bytes(), 0
        bar = tqdm(shapes, desc="hf-dcut: recording CUDA graphs", unit="graph", disable=None, leave=False)
        for shape in bar:
            rows, total = shape
            try:
                replay = recorder.record(partial(self.step, self.columns[rows], total))
                self._check(shape, replay)
            except torch.OutOfMemoryError:
                full += 1
                continue
            self.replays[shape] = replay
        self.step.forget()
        taken = size(max(0, recorder.bytes() - before))
        logger.info("recorded %d CUDA graphs, which take %s", len(self.replays), taken)
        if full:
            logger.warning(
                "memory holds %d of %d CUDA graphs: steps of other shapes run eagerly, the output is the same. Lower "
                "max_batch_size, or give fewer cuda_graph_batch_sizes",
                *(len(self.replays), len(shapes)),
            )

    def _check(self, shape: Shape, replay: Callable[[], FixedRow]) -> None:
        """Raises RuntimeError unless a replay on other inputs gives what the step itself does, after each anchor."""
        (rows, total), columns = shape, self.columns[shape[0]]
        empty = columns.clone()
        # Columns 1 and 2 are lengths and anchors. Drafts may differ where two are equally likely.
        number = torch.arange(rows, device=columns.device)
        columns[1], columns[2] = number % 2, (number + 1) % self.step.target.vocabulary
        row = self.step(columns, total)
        anchor = row.packed.start[:-1].long()
        expected = row.logits[anchor]
        difference = relative_difference(replay().logits[anchor], expected)
        columns.copy_(empty)
        if not difference <= TOLERANCE[expected.dtype]:
            raise RuntimeError(
                f"a replayed step of {rows} requests gives other logits than the step itself (relative difference "
                f"{difference:.1e}): it keeps something that changes between steps"
            )

    def _tell(self, requests: int, total: int) -> None:
        """Says, once, that a step runs eagerly since no shape holds it."""
        if not self._told:
            kind = f"{total} packed tokens" if total else "no drafts"
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


def recorder_for(device: torch.device) -> Recorder | None:
    """Returns what records steps on a device; None where there are no graphs."""
    return CudaRecorder(device) if device.type == "cuda" else None


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
        return Graphs(step, shapes, recorder)
    except FAULTS as error:
        what = f"a step cannot be recorded ({type(error).__name__}: {error})"
        if asked:
            raise RuntimeError(f"dcut cuda_graphs=True: {what}. Give 'auto' or False") from error
        logger.warning("no CUDA graphs: %s. Steps run eagerly, the output is the same", what)
        return None


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
