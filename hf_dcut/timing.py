"""Timing steps in turns, again where they vary, and evened out: the machine does other things too.

A row are the steps of one B, which are weighed against each other. They are timed in immediate succession, and a turn
in which most of them take longer than they usually do is taken for a slow moment of the machine, not for dearer steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

WARM_UP = 2
REPEATS = 5
# Half of each entry's repeats lie within this share of their median, or the row is timed again, so often.
STEADY = 0.25
_RETRIES = 2

# {T: seconds of each repeat}, T = 0 for the plain step.
Row = dict[int, list[float]]


def steadiest(
    rows: Mapping[int, Sequence[int]], step: Callable[[int, int], None], clock: Callable[[], float]
) -> dict[int, Row]:
    """Returns each row's repeats; of rows that vary much, those of the steadiest of a few tries.

    Args:
        rows: {B: [T, ..]}, what is to be timed.
        step: runs a step of B requests and T packed tokens.
        clock: gives seconds.
    """
    best = _timed(rows, step, clock)
    for _ in range(_RETRIES):
        unsteady = {requests: rows[requests] for requests, row in best.items() if not is_steady(row)}
        for requests, row in _timed(unsteady, step, clock).items():
            best[requests] = min(best[requests], row, key=_unrest)
    return best


def is_steady(row: Row) -> bool:
    """Returns whether the repeats of every entry agree."""
    return _unrest(row) <= STEADY


def spread(values: Sequence[float]) -> float:
    """Returns within what share of their median the middle half of the values lies."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def at_one_pace(row: Row) -> Row:
    """Returns a row's repeats over the pace of their turns: how much longer than usual the steps of a turn took.

    The lower median of the steps tells, so that one that was held up does not make the others look fast.
    """
    usual = {total: statistics.median(values) for total, values in row.items()}
    turns = zip(*row.values(), strict=True)
    paces = [statistics.median_low(s / u for s, u in zip(turn, usual.values(), strict=True)) for turn in turns]
    return {total: [s / pace for s, pace in zip(values, paces, strict=True)] for total, values in row.items()}


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
    rows: Mapping[int, Sequence[int]], step: Callable[[int, int], None], clock: Callable[[], float]
) -> dict[int, Row]:
    """Returns each row's repeats at one pace. All rows take turns, so that a slow minute of the machine hits all."""
    times: dict[int, Row] = {requests: {total: [] for total in totals} for requests, totals in rows.items()}
    for repeat in range(WARM_UP + REPEATS):
        for requests, row in times.items():
            for total, values in row.items():
                start = clock()
                step(requests, total)
                if repeat >= WARM_UP:
                    values.append(clock() - start)
    return {requests: at_one_pace(row) for requests, row in times.items()}


def _unrest(row: Row) -> float:
    """Returns the spread of the entry whose repeats agree least."""
    return max(map(spread, row.values()))
