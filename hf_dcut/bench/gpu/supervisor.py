"""Runs parts in a process of their own, so that one which crashes or hangs takes no other along.

A fault in a kernel can leave a device unusable for its whole process. So parts run one after the other in a worker;
when it dies or does not end in time, that part has failed, and a new worker does the rest.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from hf_dcut.bench.gpu.clock import Clock
from hf_dcut.bench.gpu.rig import Rig

if TYPE_CHECKING:
    from multiprocessing.context import ForkContext, SpawnContext

Result = dict[str, Any]
# How long a part may go on after its end before it is stopped: what it is doing cannot be interrupted otherwise.
GRACE = 10.0


@dataclass(frozen=True)
class Part:
    """One part of the check.

    Attributes:
        name: of the part.
        share: of the time there is; what one part leaves is the next one's.
        run: returns what was found, with "passed" and "skipped", or with "state" and "reason" of its own.
    """

    name: str
    share: float
    run: Callable[[Rig, Clock], Result]


# From the names of parts to their results, in a process of its own; the first argument takes them.
Serve = Callable[[Connection, Sequence[str]], None]


def results(parts: Sequence[Part], rig: Rig, ends: Mapping[str, float]) -> Iterator[tuple[str, Result]]:
    """Yields each part's name and result.

    Args:
        parts: in order.
        rig: what they run on.
        ends: by which moment of `time.monotonic()` each must be done.
    """
    for part in parts:
        clock, begin = Clock(ends[part.name]), time.monotonic()
        why = clock.late()
        found = {"state": "skipped", "reason": why} if why else {"state": "done", **part.run(rig, clock)}
        yield part.name, {**found, "seconds": time.monotonic() - begin}


def send(connection: Connection, found: Iterator[tuple[str, Result]]) -> None:
    """Sends results, and what ends them early if anything does, which is raised again."""
    try:
        for item in found:
            connection.send(item)
    except BaseException as error:
        connection.send((None, failed(f"{type(error).__name__}: {error}")))
        raise


def failed(reason: str) -> Result:
    """Returns the result of a part that did not end by itself."""
    return {"state": "failed", "reason": reason, "passed": False}


def supervise(
    names: Sequence[str],
    ends: Mapping[str, float],
    serve: Serve,
    context: SpawnContext | ForkContext | None = None,
    grace: float = GRACE,
) -> Iterator[tuple[str, Result]]:
    """Yields each part's name and result, whatever becomes of the workers.

    Args:
        names: of the parts, in order.
        ends: as in `results`.
        serve: what a worker does; it sends a pair for each part through the connection.
        context: how processes are started; anew, with nothing of this one, when None.
        grace: seconds a part may go on after its end.
    """
    todo, context = list(names), context or multiprocessing.get_context("spawn")
    while todo:
        if (why := Clock(ends[todo[0]]).late()) is not None:
            yield todo.pop(0), {"state": "skipped", "reason": why}
            continue
        ours, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=serve, args=(theirs, tuple(todo)))
        worker.start()
        theirs.close()
        try:
            while todo:
                found = _receive(ours, ends[todo[0]] + grace)
                if found is None:
                    worker.join(1.0)
                    code = worker.exitcode
                    found = failed(
                        "took too long and was stopped" if code is None else f"its process ended with {code}"
                    )
                yield todo.pop(0), found
                if found["state"] == "failed":
                    break
        finally:
            worker.kill()
            worker.join()


def _receive(connection: Connection, end: float) -> Result | None:
    """Returns the next result; None when there is none by then, or nobody is left to send one."""
    try:
        if connection.poll(max(0.0, end - time.monotonic())):
            return connection.recv()[1]
    except (EOFError, OSError):
        # Nothing, or half a message.
        return None
    return None
