"""One job, from its input to the last result."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from tqdm.auto import tqdm

from hf_dcut import BatchRequest, BatchResult
from hf_dcut.jobs.journal import replace
from hf_dcut.jobs.models import identity
from hf_dcut.jobs.output import STDOUT, FileOutput, Output, StreamOutput, Tally
from hf_dcut.jobs.plan import Plan
from hf_dcut.jobs.source import STDIN, Line, Source
from hf_dcut.jobs.worker import Refused, Worker, load

Load = Callable[[Plan, dict[str, str], torch.device], Worker]
# Processes finish their shares at different times.
_PATIENCE = timedelta(days=30)


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        lines: of the input that can be answered.
        rejected: lines that cannot.
        results: all there are, those of earlier runs included.
        tokens: new tokens of this run alone.
        seconds: of this run, from when the models were loaded.
        main: whether this process is the one that speaks for all.
    """

    lines: int
    rejected: int
    results: Tally
    tokens: int
    seconds: float
    main: bool

    @property
    def complete(self) -> bool:
        """Whether every line of the input has an answer."""
        return not self.rejected and not self.results.failed and len(self.results.done) == self.lines


def run(plan: Plan, load: Load = load) -> Outcome:
    """Returns how the job ended, after the last result is written.

    Args:
        plan: what to do.
        load: makes the worker; another one for tests.

    Raises:
        ValueError, OSError: an input, output or model that does not do; nothing was generated.
        OutputError: results cannot be written any more.
        KeyboardInterrupt: Ctrl-C; finished results are written.
    """
    state = _processes(plan)
    with closing(Source(plan.input, plan.max_new_tokens)) as source:
        _check_lines(plan, source)
        whose, revisions = _identify(plan, source)
        with closing(_open(plan, whose, state)) as output:
            # Not before: these may be the rejects of another run, whose results are refused.
            _keep_rejects(plan, source, state)
            return _work(plan, source, output, state, lambda: load(plan, revisions, state.device))


def _processes(plan: Plan) -> PartialState:
    """Returns this process among those that share the job."""
    # Accelerate takes processes on CPUs for separate runs unless it is told that they are on CPUs.
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    state = PartialState(cpu=cpu, timeout=_PATIENCE)
    if state.num_processes > 1 and (plan.input == STDIN or plan.output == STDOUT):
        raise ValueError(f"{state.num_processes} processes share a job: give files as input and output, not '-'")
    return state


def _open(plan: Plan, whose: dict[str, Any], state: PartialState) -> Output:
    """Returns where results go; ValueError if they are another run's than `whose`."""
    if plan.output == STDOUT:
        return StreamOutput()
    return FileOutput(Path(plan.output), whose, plan.retry_errors, state)


def _check_lines(plan: Plan, source: Source) -> None:
    """Raises ValueError if there is nothing to answer, or, when the plan is strict, a line that cannot be."""
    if source.rejects and (plan.strict or not source.lines):
        number, reason = next(iter(source.rejects.items()))
        more = len(source.rejects) - 1
        raise ValueError(f"input {plan.input}, line {number}: {reason}" + (f"; and {more} more lines" if more else ""))
    if not source.lines:
        raise ValueError(f"input {plan.input} has no lines")


def _keep_rejects(plan: Plan, source: Source, state: PartialState) -> None:
    """Writes the rejected lines to their file."""
    path = plan.rejects_path
    if state.is_main_process and path is not None and source.rejects:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, source.rejected())


def _identify(plan: Plan, source: Source) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns what tells this job's results from others, and the commits of models that come from the Hub."""
    given = {"target": (plan.target, plan.target_revision)}
    if plan.drafter_source is not None:
        given["drafter"] = (plan.drafter_source, plan.drafter_revision)
    found = {which: identity(*model) for which, model in given.items()}
    revisions = {which: found[which] for which, (name, _) in given.items() if not Path(name).is_dir()}
    weights = {f"{which} revision": value for which, value in found.items()}
    return {**plan.fingerprint(), **weights, "input": source.digest}, revisions


def _work(plan: Plan, source: Source, output: Output, state: PartialState, load: Callable[[], Worker]) -> Outcome:
    """Answers this process's share of the lines that have no result yet."""
    before, start = output.tally.tokens, time.perf_counter()
    left = source.lines - len(output.tally.done)
    if left:
        worker = load()
        longest = worker.longest(_share(source, output.tally.done, state))
        start = time.perf_counter()
        with _bar(source, output, state) as bar:
            for record in _records(_share(source, output.tally.done, state), worker, longest, plan):
                output.append(record)
                _show(bar, output.tally, before, start)
    output.finish()
    seconds = time.perf_counter() - start
    tally = output.tally
    return Outcome(
        source.lines, len(source.rejects), tally, tally.tokens - before, seconds, bool(state.is_main_process)
    )


def _share(source: Source, done: set[int], state: PartialState) -> Iterator[Line]:
    """Yields this process's lines of those without a result: every n-th of them, for n processes."""
    done = set(done)
    left = (line for line in source if line.number not in done)
    yield from (line for i, line in enumerate(left) if i % state.num_processes == state.process_index)


def _records(lines: Iterator[Line], worker: Worker, longest: int, plan: Plan) -> Iterator[dict[str, Any]]:
    """Yields one record a line, in the order in which they finish.

    Args:
        lines: to answer.
        worker: answers them.
        longest: tokens of the longest, its answer included.
        plan: tells what a record holds.
    """
    running: dict[str, Line] = {}
    refused: list[dict[str, Any]] = []

    def requests() -> Iterator[BatchRequest]:
        for line in lines:
            try:
                request = worker.request(line)
            except Refused as error:
                refused.append(_named(line) | {"error": str(error)})
            else:
                running[str(line.number)] = line
                yield request

    for result in worker.answer(requests(), longest):
        yield from refused
        refused.clear()
        yield _record(running.pop(result.request_id), result, worker, plan)
    yield from refused
    if running:
        raise RuntimeError(f"lines {sorted(map(int, running))} got no result: this is a fault of hf-dcut")


def _named(line: Line) -> dict[str, Any]:
    named: dict[str, Any] = {"id": line.id, "line": line.number}
    return named if line.metadata is None else named | {"metadata": line.metadata}


def _record(line: Line, result: BatchResult, worker: Worker, plan: Plan) -> dict[str, Any]:
    """Returns what is written of a result."""
    if result.error is not None:
        return _named(line) | {"error": result.error}
    tokens, totals = result.generated_tokens, result.totals
    record = _named(line) | {
        "text": worker.text(tokens),
        "tokens": len(tokens),
        "finish_reason": result.finish_reason,
        "stats": {
            "prompt_tokens": len(result.prompt_ids),
            "steps": totals.steps,
            "kept": totals.kept,
            "accepted": totals.accepted,
            "mean_accepted_tokens": round((totals.accepted + totals.steps) / totals.steps, 3) if totals.steps else 0.0,
            "seconds": round(result.seconds, 3),
        },
    }
    return record | {"token_ids": list(tokens)} if plan.token_ids else record


def _bar(source: Source, output: Output, state: PartialState) -> tqdm[Any]:
    """Returns the progress bar of the job, or of this process's share; in a log it comes once in half a minute."""
    left = source.lines - len(output.tally.done)
    share = len(range(state.process_index, left, state.num_processes))
    first = len(output.tally.done) if state.num_processes == 1 else 0
    return tqdm(
        desc="hf-dcut run",
        total=first + share,
        initial=first,
        unit="line",
        disable=not state.is_main_process,
        mininterval=0.5 if sys.stderr.isatty() else 30.0,
    )


def _show(bar: tqdm[Any], tally: Tally, before: int, start: float) -> None:
    speed = (tally.tokens - before) / (time.perf_counter() - start)
    bar.set_postfix_str(f"{speed:.1f} tokens/s, {tally.mean_accepted_tokens:.2f} a step", refresh=False)
    bar.update()
