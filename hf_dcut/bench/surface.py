"""`Surface`: step seconds at any batch size and number of positions, for the replay.

The engine's `CostTable` answers from the nearest measured batch size. A replay also asks for sizes that nobody
measured, so here both directions are interpolated, along the share of positions and between batch sizes, and beyond the
measured ones continued along the nearest two: so do steps grow that are bound by arithmetic.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Self

from hf_dcut.cost_table import CostTable

Rows = Mapping[int, Mapping[int, float]]


class Surface(CostTable):
    """Interpolated seconds of steps.

    Args:
        rows: {B: {T: seconds}}; T = 0 is the plain step, which may be missing.
        draft_tokens: D.

    Raises:
        ValueError: a batch size without drafted steps, or no batch size.
    """

    def __init__(self, rows: Rows, draft_tokens: int):
        super().__init__(draft_tokens)
        self.rows = {b: dict(rows[b]) for b in sorted(rows)}
        if not self.rows or not all(any(row) for row in self.rows.values()):
            raise ValueError(f"cost rows of B = {list(self.rows)}: give drafted steps of at least one batch size")
        self.seconds = {0: self.rows}

    def drafted(self, requests: int, total: int, kv_length: int = 0) -> float:
        """Returns C(B, T)."""
        share = total / requests
        return _line(
            [(b, _line([(t / b, s) for t, s in row.items() if t], share)) for b, row in self._items()], requests
        )

    def plain(self, requests: int, kv_length: int = 0) -> float:
        """Returns seconds of a plain step; infinite where the table has none, so that drafting always pays."""
        points = [(b, row[0]) for b, row in self._items() if 0 in row]
        return _line(points, requests) if points else math.inf

    @property
    def row_seconds(self) -> float:
        """Seconds of a further row where there are many, as of a prompt's token: the slope at the largest B."""
        totals = sorted(t for t in self.rows[max(self.rows)] if t)
        (t0, s0), (t1, s1) = ((t, self.rows[max(self.rows)][t]) for t in (totals[len(totals) // 2], totals[-1]))
        return (s1 - s0) / (t1 - t0) if t1 > t0 else 0.0

    def faster(self, factor: float) -> Self:
        """Returns a hypothetical device with so many times the compute and the same memory bandwidth.

        What a step takes beyond the shortest step of the table is divided by the factor; the shortest is taken as the
        time to read the weights, which compute does not shorten.
        """
        floor = min(min(row.values()) for row in self.rows.values())
        rows = {b: {t: floor + (s - floor) / factor for t, s in row.items()} for b, row in self._items()}
        return type(self)(rows, self.draft_tokens)

    def _items(self) -> list[tuple[int, dict[int, float]]]:
        return list(self.rows.items())


def published() -> dict[str, Any]:
    """Returns the paper's numbers: tables 1 to 3 and what its figures state, as `data/paper.json` holds them."""
    return json.loads((files("hf_dcut.bench") / "data" / "paper.json").read_text())


def surface_of(name: str, measured: Surface | None = None) -> Surface:
    """Returns the surface of a name: "h20", "h800" (the paper's table 3) or "measured"; with ":2x" a faster device.

    Args:
        name: such as "h20", "measured:4x".
        measured: what "measured" stands for.

    Raises:
        ValueError: an unknown name, or "measured" without measurements.
    """
    base, _, factor = name.partition(":")
    table = published()["table3"]
    if base == "measured" and measured is not None:
        surface = measured
    elif base in table["devices"]:
        rows = {int(b): {int(t): ms / 1e3 for t, ms in row.items()} for b, row in table["devices"][base].items()}
        surface = Surface(rows, table["draft_tokens"])
    else:
        known = [*table["devices"], *(["measured"] if measured is not None else [])]
        raise ValueError(f"costs {name!r}: give {', '.join(known)}, or one of them with :2x behind it")
    if not factor:
        return surface
    if not factor.endswith("x") or not factor[:-1].replace(".", "", 1).isdecimal() or not float(factor[:-1]):
        raise ValueError(f"costs {name!r}: give a factor such as :2x or :4x")
    return surface.faster(float(factor[:-1]))


def _line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Returns y at x on the line through points (x, y), continued at both ends.

    Measured points scatter, so that a continued line may fall: behind the last point y is at least what it was there,
    and before the first at least half of that.
    """
    points = sorted(points)
    if len(points) == 1:
        return points[0][1]
    right = min(max(1, bisect.bisect_left([p[0] for p in points], x)), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    y = y0 + (x - x0) / (x1 - x0) * (y1 - y0)
    return max(y, y1) if x > x1 else max(y, y0 / 2) if x < x0 else y
