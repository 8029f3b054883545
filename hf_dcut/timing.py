"""Timing steps in turns, again where they vary, and evened out: the machine does other things too."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

WARM_UP = 2
REPEATS = 5
# Half of an entry's repeats lie within this share of their median, or it is timed again, so often.
STEADY = 0.25
_RETRIES = 2


def steadiest(
    steps: Sequence[tuple[int, int]], step: Callable[[int, int], None], clock: Callable[[], float]
) -> dict[tuple[int, int], list[float]]:
    """Returns the seconds of each (B, T)'s repeats; where they vary much, those of the steadiest of a few tries."""
    best = _timed(steps, step, clock)
    for _ in range(_RETRIES):
        unsteady = [entry for entry, values in best.items() if not is_steady(values)]
        again = _timed(unsteady, step, clock)
        best |= {entry: min(best[entry], again[entry], key=spread) for entry in unsteady}
    return best


def is_steady(values: Sequence[float]) -> bool:
    """Returns whether an entry's repeats agree."""
    return spread(values) <= STEADY


def spread(values: Sequence[float]) -> float:
    """Returns within what share of their median the middle half of the values lies."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def rising(row: dict[int, float]) -> dict[int, float]:
    """Returns the seconds of a row {T: seconds} that are nearest to it and never fall with T: less for more is noise.

    Neighbours in the wrong order get their mean (pool adjacent violators). A plain step, T = 0, comes first.
    """
    pools: list[tuple[float, int]] = []
    for total in sorted(row):
        seconds, count = row[total], 1
        while pools and pools[-1][0] > seconds:
            before, many = pools.pop()
            seconds, count = (before * many + seconds * count) / (many + count), many + count
        pools.append((seconds, count))
    return dict(zip(sorted(row), (seconds for seconds, count in pools for _ in range(count)), strict=True))


def _timed(
    steps: Sequence[tuple[int, int]], step: Callable[[int, int], None], clock: Callable[[], float]
) -> dict[tuple[int, int], list[float]]:
    """Returns the seconds of each (B, T)'s repeats, in turns, so that a slow moment of the machine hits all alike."""
    times: dict[tuple[int, int], list[float]] = {entry: [] for entry in steps}
    for repeat in range(WARM_UP + REPEATS):
        for entry in steps:
            start = clock()
            step(*entry)
            if repeat >= WARM_UP:
                times[entry].append(clock() - start)
    return times
