"""`BatchManager`: a batch job in a thread of its own, to which other threads submit while it runs.

Its methods are named as those of Transformers' `ContinuousBatchingManager`, but nothing is dropped in silence: a full
queue, an unknown id, a time that runs out and a worker that failed are all errors of the caller.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from hf_dcut.batch_records import BatchRequest, BatchResult, result_of
from hf_dcut.engine import Engine
from hf_dcut.intake import Intake, check_count
from hf_dcut.prepacking import renew
from hf_dcut.requests import Request
from hf_dcut.stats import Stats


class QueueFull(RuntimeError):
    """As many requests wait as may wait."""


class BatchManager:
    """Runs requests as they are submitted; any thread may submit, cancel and wait.

    As a context it starts on entering; on leaving it finishes what was submitted, or cancels it after an exception.

    Args:
        model: the target. Only this manager's thread runs it.
        generation_config: options of requests that have none of their own.
        max_length: tokens of the longest request that is admitted, prompt and longest answer together.
        max_queue: requests that may wait for a slot.
        arguments: the others of `iterate_batch`.

    Attributes:
        stats: what the steps did so far.

    Raises:
        ValueError, TypeError: an argument that no request could be run with.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig | None = None,
        *,
        max_length: int,
        max_queue: int = 1024,
        **arguments: Any,
    ):
        check_count("max_length", max_length)
        check_count("max_queue", max_queue)
        self.stats, self.max_queue = Stats(), max_queue
        self._intake = Intake(model, generation_config, max_length=max_length, **arguments)
        if self._intake.ranks.size > 1:
            raise ValueError(
                f"model lies in {self._intake.ranks.size} processes, and a BatchManager takes requests whenever they "
                "come, which is another moment in each: use generate_batch or iterate_batch, or load the model whole"
            )
        self._thread: threading.Thread | None = None
        # Everything below is read and written under this condition only, which tells of every change.
        self._changed = threading.Condition()
        self._numbers = 0
        self._unfinished: dict[str, Request] = {}
        self._submitted: list[Request] = []
        self._cancelled: list[Request] = []
        self._results: dict[str, BatchResult] = {}
        self._stopping = self._over = False
        self._failure: BaseException | None = None

    def start(self) -> None:
        """Starts the thread.

        Raises:
            RuntimeError: it was started before.
        """
        if self._thread is not None:
            raise RuntimeError("this BatchManager was started before: make another one")
        self._thread = threading.Thread(target=self._work, name="hf-dcut batch", daemon=True)
        self._thread.start()

    def is_running(self) -> bool:
        """Returns whether the thread works or waits for requests."""
        return self._thread is not None and self._thread.is_alive()

    def add_request(
        self, input_ids: Sequence[int], request_id: str | None = None, timeout: float | None = None, **fields: Any
    ) -> str:
        """Returns the id of a new request, whose result `get_result` waits for.

        Args:
            input_ids: the prompt.
            request_id: key of its result; "req_0", "req_1", .. in order of submission when None.
            timeout: seconds to wait while the queue is full; None waits for ever, 0 not at all.
            fields: the others of `BatchRequest`: `generation_config`, `seed`, `priority` and so on.

        Raises:
            QueueFull: there was no place in that time.
            RuntimeError: the manager was stopped, or its thread failed.
            ValueError, TypeError: a request that cannot be run.
        """
        with self._changed:
            number, self._numbers = self._numbers, self._numbers + 1
        requests = self._intake.requests(BatchRequest(input_ids, request_id, **fields), number)
        with self._changed:
            place = self._changed.wait_for(lambda: self._closed or self._waiting < self.max_queue, timeout)
            if self._closed:
                raise RuntimeError("this BatchManager takes no requests any more: it has ended") from self._failure
            if not place:
                raise QueueFull(
                    f"max_queue={self.max_queue} requests wait already: submit later, give a longer timeout, or "
                    f"raise max_queue"
                )
            for request in requests:
                if request.name in self._unfinished or request.name in self._results:
                    raise ValueError(f"request_id={request.name!r} is taken until its result is: give another")
            self._unfinished |= {request.name: request for request in requests}
            self._submitted += requests
            self._changed.notify_all()
        return requests[0].name

    def add_requests(self, inputs: Iterable[Sequence[int]], timeout: float | None = None, **fields: Any) -> list[str]:
        """Returns the ids of several requests; else as `add_request`."""
        return [self.add_request(input_ids, timeout=timeout, **fields) for input_ids in inputs]

    def cancel_request(self, request_id: str) -> None:
        """Ends a request before the next step, which frees its slot; its result has what it had generated.

        Nothing happens to one that has ended.

        Raises:
            ValueError: no such request.
        """
        with self._changed:
            if request_id in self._unfinished:
                self._cancelled.append(self._unfinished[request_id])
                self._changed.notify_all()
            elif request_id not in self._results:
                raise ValueError(_unknown(request_id))

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> BatchResult:
        """Returns the result of a request once it has ended, and forgets it; without an id, the next that has.

        Args:
            request_id: as `add_request` returned it.
            timeout: seconds to wait; None waits for ever.

        Raises:
            TimeoutError: it has not ended in that time.
            RuntimeError: the manager's thread failed, or has ended without further results.
            ValueError: no such request, or its result was taken already.
        """
        with self._changed:
            in_time = self._changed.wait_for(lambda: self._ready(request_id) or self._settled(request_id), timeout)
            name = self._ready(request_id)
            if name is not None:
                return self._results.pop(name)
            if not self._known(request_id):
                raise ValueError(_unknown(request_id))
            if in_time:
                raise RuntimeError("no result will come any more: the manager has ended") from self._failure
            raise TimeoutError(f"{request_id or 'no request'} has not ended within {timeout} s")

    def __iter__(self) -> Iterator[BatchResult]:
        """Yields results as requests end, until the manager is stopped and all were taken."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._results or self._over)
                self._raise_failure()
                if not self._results:
                    return
                result = self._results.pop(next(iter(self._results)))
            yield result

    def stop(self, block: bool = True, timeout: float | None = None, hard_stop: bool = False) -> None:
        """Takes no requests any more, and ends the thread once those submitted have ended.

        Args:
            block: whether to wait for that.
            timeout: seconds to wait; None waits for ever.
            hard_stop: whether requests that have not ended are cancelled.

        Raises:
            TimeoutError: the thread has not ended in that time.
            RuntimeError: it failed.
        """
        with self._changed:
            self._stopping = True
            if hard_stop:
                self._cancelled += self._unfinished.values()
            self._changed.notify_all()
        if self._thread is None:
            with self._changed:
                self._over = True
        elif block:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"requests have not ended within {timeout} s: wait longer, or stop(hard_stop=True)")
            self._raise_failure()

    def __enter__(self) -> BatchManager:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.stop(block=kind is None, hard_stop=kind is not None)
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        """The thread: runs the engine until it is stopped, and leaves what it raised to the callers."""
        kept = _Kept()
        with kept, self._intake.open_engine(self.stats) as engine:
            while self._exchange(engine):
                if engine.busy:
                    self._deliver(engine.step())
        with self._changed:
            self._failure, self._over = kept.error, True
            self._changed.notify_all()

    def _exchange(self, engine: Engine) -> bool:
        """Takes in what callers asked for since the last step, waiting for it if there is nothing to do.

        Returns whether to go on.
        """
        with self._changed:
            self._changed.notify_all()
            if not engine.busy and not self._submitted:
                self._changed.wait_for(lambda: self._submitted or self._cancelled or self._stopping)
                # Weights may have changed while nobody waited.
                renew(engine.target.model)
            for request in self._submitted:
                engine.roster.add(request)
            cancelled = [request for request in self._cancelled if request.finish_reason is None]
            for request in cancelled:
                engine.cancel(request)
            self._submitted, self._cancelled = [], []
            self._deliver(cancelled)
            return engine.busy or not self._stopping

    def _deliver(self, requests: Iterable[Request]) -> None:
        with self._changed:
            for request in requests:
                del self._unfinished[request.name]
                self._results[request.name] = result_of(request)
            self._changed.notify_all()

    @property
    def _closed(self) -> bool:
        return self._stopping or self._over

    @property
    def _waiting(self) -> int:
        return sum(request.slot < 0 for request in self._unfinished.values())

    def _ready(self, request_id: str | None) -> str | None:
        """Returns whose result can be taken: that of the id, or the oldest."""
        name = next(iter(self._results), None) if request_id is None else request_id
        return name if name in self._results else None

    def _settled(self, request_id: str | None) -> bool:
        """Returns whether waiting for a result is in vain."""
        return self._over or not self._known(request_id)

    def _known(self, request_id: str | None) -> bool:
        return request_id is None or request_id in self._unfinished or request_id in self._results

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the manager's thread failed: {self._failure!r}") from self._failure


class _Kept:
    """A context that keeps what is raised in it."""

    error: BaseException | None = None

    def __enter__(self) -> _Kept:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.error = error
        return True


def _unknown(request_id: str | None) -> str:
    return f"request_id={request_id!r}: there is no such request, or its result was taken already"
