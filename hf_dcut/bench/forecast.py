"""Forecasts from a run's recorded drafts: other machines, other batch sizes, and how well they meet measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hf_dcut.bench.cell import Cell, Key
from hf_dcut.bench.journal import Journal
from hf_dcut.bench.methods import PLAIN, SHORT, TREE, TREE_AUTO
from hf_dcut.bench.peers import PEERS
from hf_dcut.bench.policies import BUDGETS
from hf_dcut.bench.rounds import blocks_of
from hf_dcut.bench.simulator import replay
from hf_dcut.bench.surface import Surface, surface_of
from hf_dcut.bench.table import markdown
from hf_dcut.bench.trace import Trace
from hf_dcut.cost_table import CostTable

WITHIN = 0.10


def forecast(traces: Sequence[Trace], costs: Surface, batch: int, method: str) -> float:
    """Returns tokens/s of a method, without reading prompts.

    Args:
        traces: recorded requests; they are repeated until there are two for each slot.
        costs: seconds of steps.
        batch: B.
        method: as in `simulator.replay`.
    """
    enough = [traces[i % len(traces)] for i in range(max(len(traces), 2 * batch))]
    return replay(enough, batch, method, costs).tokens_per_second


def forecast_table(
    journal: Journal, costs: Sequence[str], batches: Sequence[int], methods: Sequence[str] | None = None
) -> str:
    """Returns forecasts for cost tables and batch sizes as Markdown: tokens/s, and over verifying every draft.

    Args:
        journal: of a run with recorded drafts.
        costs: names, as in `surface.surface_of`.
        batches: B's.
        methods: as in `simulator.replay`; when None the budgets, and "tree-auto" where trees were recorded.

    Raises:
        ValueError: nothing recorded, no trees for a method that drafts them, or an unknown name.
    """
    names = tuple(methods or (*BUDGETS, *([TREE_AUTO] if journal.recorded(tree=True) else [])))
    rows = []
    for data in _recorded(journal):
        traces = {method: _traces(journal, data, method) for method in names}
        depth = journal.traces(data)[0].depth
        for cost in costs:
            surface = {m: surface_of(cost, journal.surface(depth, m.startswith(TREE))) for m in names}
            for batch in batches:
                speed = {method: forecast(traces[method], surface[method], batch, method) for method in names}
                full = speed.get("1.0")
                cells = [f"{v:.0f}" + (f" ({v / full:.2f})" if full else "") for v in speed.values()]
                rows.append([data, cost, str(batch), *cells])
    return markdown(["data", "costs", "B", *names], rows)


@dataclass(frozen=True)
class Check:
    """A forecast beside its measurement.

    Attributes:
        key: the cell.
        method: of ours.
        measured, predicted: tokens/s.
        gain, predicted_gain: the same over our plain decoding; None for that itself, and without it.
    """

    key: Key
    method: str
    measured: float
    predicted: float
    gain: float | None
    predicted_gain: float | None

    @property
    def error(self) -> float:
        """Share that the forecast is off."""
        return self.predicted / self.measured - 1

    @property
    def gain_error(self) -> float | None:
        """Share that the forecast of the gain is off, in which a machine that has become slower counts for nothing."""
        return self.predicted_gain / self.gain - 1 if self.predicted_gain and self.gain else None


def check(journal: Journal, fit: Key) -> list[Check]:
    """Returns forecasts for cells with other prompts and another batch size than the one they were fitted on.

    One number is fitted, on the one cell: how much slower real steps are than profiled ones. A machine that was slower
    in a cell than in that one is told by its pulse.

    Args:
        journal: of a run with recorded drafts.
        fit: the cell to fit on.

    Raises:
        ValueError: no such cell, or none with other prompts and another batch size.
    """
    cells = {cell.key: cell for cell in journal.cells()}
    others = [key for key in cells if _comparable(key, fit) and key.data in journal.recorded()]
    if fit not in cells or fit.data not in journal.recorded() or not others:
        raise ValueError(
            f"fit={fit}: name a cell of the run, as DATA:B; it takes two recorded data sets at two batch sizes or more"
        )
    scale = _scale(journal, cells[fit])
    found = []
    for key in others:
        speeds, pace = {}, _pace(cells[key], cells[fit])
        for method in _ours(journal, cells[key]):
            speeds[method] = 1 / (pace * scale * _seconds_per_token(journal, cells[key], method))
        for method, speed in speeds.items():
            measured, gain = cells[key].speed(method), cells[key].ratio(method, PLAIN)
            assert measured is not None
            over = None if method == PLAIN or gain is None else gain.value
            found.append(Check(key, method, measured, speed, over, over and speed / speeds[PLAIN]))
    return found


def check_table(journal: Journal, fit: str) -> str:
    """Returns the forecasts beside the measurements as Markdown, and a line that sums up.

    Args:
        journal: of a run.
        fit: the cell to fit on, as "gsm8k:8".
    """
    checks = check(journal, _key_of(journal, fit))
    rows = [[str(c.key), c.method, f"{c.measured:.1f}", f"{c.predicted:.1f}", *map(_off, _errors(c))] for c in checks]
    table = markdown(["cell", "method", "measured", "forecast", "off", "off, over plain"], rows)
    columns = zip(*map(_errors, checks), strict=True)
    lines = [_summary([e for e in errors if e is not None]) for errors in columns]
    return f"{table}\n\nfitted on {fit}, tokens/s: {lines[0]}" + (f"\nover plain: {lines[1]}" if lines[1] else "")


def _errors(one: Check) -> tuple[float | None, float | None]:
    return one.error, one.gain_error


def _off(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"


def _summary(errors: Sequence[float]) -> str:
    """Returns how many forecasts are near enough; nothing without any."""
    if not errors:
        return ""
    sizes = [abs(error) for error in errors]
    inside = sum(size <= WITHIN for size in sizes)
    return (
        f"{inside} of {len(sizes)} forecasts within {WITHIN:.0%}, median error {statistics.median(sizes):.1%}, "
        f"largest {max(sizes):.1%}"
    )


def _scale(journal: Journal, cell: Cell) -> float:
    """Returns how many times as long as in the replay a token took in a cell, the geometric mean over its methods."""
    speeds = {method: cell.speed(method) or 1.0 for method in _ours(journal, cell)}
    return statistics.geometric_mean(
        1 / (speed * _seconds_per_token(journal, cell, method)) for method, speed in speeds.items()
    )


def _pace(cell: Cell, other: Cell) -> float:
    """Returns how much slower the machine was in a cell than in another, by its pulse; 1 where that is not known."""
    return cell.pulse / other.pulse if cell.pulse and other.pulse else 1.0


def _seconds_per_token(journal: Journal, cell: Cell, method: str) -> float:
    """Returns profiled seconds of steps and prompts for each new token of a method in a cell."""
    key = cell.key
    traces = _traces(journal, key.data, method)
    costs = journal.surface(key.draft_tokens, method.startswith(TREE))
    assert costs is not None
    believed, reading = CostTable.from_rows(costs.rows, costs.draft_tokens), costs.row_seconds
    plan = journal.header["plan"]
    count = max(plan["prompts"], key.batch * plan["per_slot"])
    blocks = [traces[block] for block in blocks_of(count, key.batch, plan["per_slot"]) if block.stop <= len(traces)]
    seconds, tokens = 0.0, 0
    for block in blocks or [traces]:
        replayed = replay(block, key.batch, method, costs, believed, reading, costs.draft_tokens)
        seconds += replayed.seconds
        tokens += replayed.stats.new_tokens
    return seconds / tokens


def _traces(journal: Journal, data: str, method: str) -> list[Trace]:
    """Returns the recorded requests whose drafts are of the kind that a method makes."""
    found = journal.traces(data, method.startswith(TREE))
    if not found:
        raise ValueError(
            f"method {method!r}: {journal.path} has no trees of {data}, a run with {TREE_AUTO} records them"
        )
    return found


def _comparable(key: Key, fit: Key) -> bool:
    return (
        key.data != fit.data
        and key.batch != fit.batch
        and key.draft_tokens == fit.draft_tokens
        and not key.temperature
        and not fit.temperature
    )


def _ours(journal: Journal, cell: Cell) -> list[str]:
    """Returns the methods of a cell that a replay knows: those whose drafts were recorded."""
    others = (SHORT,) if cell.key.data in journal.recorded(tree=True) else (SHORT, TREE)
    return [m for m in cell.methods if m not in PEERS and not m.startswith(others) and cell.speed(m) is not None]


def _key_of(journal: Journal, fit: str) -> Key:
    data, _, batch = fit.rpartition(":")
    for cell in journal.cells():
        if (cell.key.data, str(cell.key.batch), cell.key.temperature) == (data, batch, 0.0):
            return cell.key
    raise ValueError(
        f"fit={fit!r}: the run has the cells {', '.join(f'{c.key.data}:{c.key.batch}' for c in journal.cells())}"
    )


def _recorded(journal: Journal) -> list[str]:
    names = journal.recorded()
    if not names:
        raise ValueError(f"{journal.path} has no recorded drafts: run hf-dcut bench with --record 32")
    return names
