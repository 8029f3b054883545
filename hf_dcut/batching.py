"""Batch jobs: any number of requests through one loop that keeps its slots full.

`generate_batch` takes a list and returns everything; `iterate_batch` takes any iterable, as slowly as it is worked off,
and gives each result as it comes. Whatever arrives, ends or fails around a request, its tokens are those of plain
`generate` for it alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

from accelerate import Accelerator
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel

from hf_dcut.batch_records import CHILD, BatchRequest, BatchResult, failed, name_of, result_of
from hf_dcut.engine import Engine
from hf_dcut.intake import Intake
from hf_dcut.parallel import Replicas
from hf_dcut.requests import OWN_FAULTS, Request
from hf_dcut.stats import Stats


class BatchError(RuntimeError):
    """Requests of a batch failed.

    Attributes:
        results: of all requests, by id; the failed ones have their `error`.
    """

    def __init__(self, message: str, results: dict[str, BatchResult]):
        super().__init__(message)
        self.results = results


class BatchInterrupted(KeyboardInterrupt):
    """A batch was interrupted.

    Attributes:
        results: of the requests that had ended, by id.
    """

    def __init__(self, results: dict[str, BatchResult]):
        super().__init__(f"{len(results)} requests had ended: see .results")
        self.results = results


def generate_batch(
    model: PreTrainedModel,
    inputs: Sequence[Sequence[int] | BatchRequest],
    generation_config: GenerationConfig | None = None,
    *,
    progress_bar: bool = True,
    raise_errors: bool = True,
    accelerator: Accelerator | None = None,
    seed: int | None = None,
    **arguments: Any,
) -> dict[str, BatchResult]:
    """Returns the result of every request by its id, in the order of the inputs.

    Args:
        model, inputs, generation_config: as for `iterate_batch`.
        progress_bar: whether one is shown.
        raise_errors: whether requests that failed raise at the end; else they are results with an `error`.
        accelerator: of several processes, each with a replica of the model or a part of one. Every replica answers a
            share of the inputs, which are the same in all processes, and each process gets all results.
        seed: as for `iterate_batch`. With it, results do not depend on the number of replicas.
        arguments: the others of `iterate_batch`.

    Raises:
        BatchError: requests failed, and their ids; it holds all results.
        BatchInterrupted: a `KeyboardInterrupt` that holds the results so far.
        ValueError, TypeError, MemoryError: as `iterate_batch`.
    """
    if not isinstance(inputs, Sequence) or isinstance(inputs, str | bytes):
        raise TypeError(f"inputs is a {type(inputs).__name__}: give a list, or use iterate_batch")
    names = [name_of(given, number) for number, given in enumerate(inputs)]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"request_id={twice!r} is given twice: give each request its own, or none")
    results: dict[str, BatchResult] = {}
    replicas = Replicas(model, accelerator)
    mine = replicas.share(list(enumerate(inputs)))
    try:
        with _run_of(mine, Intake(model, generation_config, seed=replicas.seed(seed), **arguments)) as run:
            hidden = not (progress_bar and replicas.main)
            bar = tqdm(run, total=len(mine), desc="hf-dcut", unit="request", disable=hidden)
            for result in bar:
                results[result.request_id] = result
                bar.set_postfix_str(_progress(run.stats), refresh=False)
    except KeyboardInterrupt as error:
        raise BatchInterrupted(results) from error
    results = replicas.gather(results)
    # The sequences of an input are named after it, in Transformers' way, and came in any order.
    place = {name: number for number, name in enumerate(names)}
    origin = {name: name if name in place else name.rpartition(CHILD)[0] for name in results}
    results = dict(sorted(results.items(), key=lambda item: (place[origin[item[0]]], len(item[0]), item[0])))
    wrong = [name for name, result in results.items() if result.error is not None]
    if wrong and raise_errors:
        shown = "; ".join(f"{name}: {results[name].error}" for name in wrong[:3])
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise BatchError(
            f"{len(wrong)} of {len(results)} requests failed ({shown}{more}). The others are in this error's .results; "
            f"raise_errors=False returns all",
            results,
        )
    return results


def iterate_batch(
    model: PreTrainedModel,
    inputs: Iterable[Sequence[int] | BatchRequest],
    generation_config: GenerationConfig | None = None,
    **arguments: Any,
) -> BatchRun:
    """Returns an iterator over the results in the order in which the requests end.

    A request that fails by itself gives a result with an `error`; the others go on. Interrupted while it is iterated
    over, it has given all results there are, and the model is as before.

    Args:
        model: the target.
        inputs: prompts as token ids, or `BatchRequest`s; an iterable is asked for more as slots become free.
        generation_config: options of requests that have none of their own; the model's when None.
        arguments: those of `Intake`: `assistant_model`, `dcut`, `max_batch_size`, `max_length` (needed where `inputs`
            is no list), `seed`, `tokenizer`, `logits_processor`, `stopping_criteria`, `prefix_allowed_tokens_fn`, and
            fields of `GenerationConfig` such as `max_new_tokens`.

    Raises:
        ValueError, TypeError: an argument that no request could be run with.
        MemoryError: not even one slot fits, when the first result is asked for.
    """
    intake = Intake(model, generation_config, **arguments)
    if isinstance(inputs, Sequence):
        return _run_of(list(enumerate(inputs)), intake)
    if intake.max_length is None:
        raise ValueError(
            "max_length=None: the lengths of these inputs are not known beforehand. Give the most tokens that a "
            "request may have, its prompt and its longest answer together"
        )
    return BatchRun(intake, enumerate(inputs))


class BatchRun:
    """An iterator over the results of a job. As a context it gives its memory and hooks back on leaving.

    Args:
        intake: the job's settings.
        inputs: numbered.

    Attributes:
        stats: what the steps did so far.
    """

    def __init__(self, intake: Intake, inputs: Iterable[tuple[int, object]]):
        self.stats = Stats()
        self._intake, self._inputs = intake, iter(inputs)
        self._results = self._run()

    def __iter__(self) -> Iterator[BatchResult]:
        return self

    def __next__(self) -> BatchResult:
        return next(self._results)

    def __enter__(self) -> BatchRun:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the job; requests that run are dropped. Nothing happens the second time."""
        self._results.close()

    def _run(self) -> Generator[BatchResult]:
        with self._intake.open_engine(self.stats) as engine:
            yield from self._top_up(engine)
            while engine.busy:
                for request in engine.step():
                    yield result_of(request)
                yield from self._top_up(engine)

    def _top_up(self, engine: Engine) -> Iterator[BatchResult]:
        """Lets as many wait as could be admitted at once, so that no slot stays empty; yields those that cannot."""
        while len(engine.roster.waiting) < engine.roster.slots:
            item = next(self._inputs, None)
            if item is None:
                return
            number, given = item
            try:
                self._add(engine, self._intake.requests(given, number))
            except OWN_FAULTS as error:
                yield failed(given, number, error)

    def _add(self, engine: Engine, requests: Iterable[Request]) -> None:
        names = {request.name for request in (*engine.roster.live, *engine.roster.waiting)}
        for request in requests:
            if request.name in names:
                raise ValueError(f"request_id={request.name!r} is that of a request which still runs: give another")
            engine.roster.add(request)


def _run_of(numbered: Sequence[tuple[int, object]], intake: Intake) -> BatchRun:
    """Returns a job of inputs that are all known: as many slots as needed, as long as needed, and the urgent go first.

    Args:
        numbered: the inputs, each with its number in the whole job.
        intake: its settings.
    """
    intake.fit_to([given for _, given in numbered])
    return BatchRun(intake, sorted(numbered, key=lambda pair: -getattr(pair[1], "priority", 0)))


def _progress(stats: Stats) -> str:
    """Returns what a progress bar tells besides the number of requests."""
    speed = f"{stats.tokens_per_second:.0f} tokens/s"
    return f"{speed}, {stats.mean_accepted_tokens:.2f} a step" if stats.rows else speed
