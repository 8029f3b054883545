"""The figures of a report, readable in black and white: methods differ by marker and dash, not by colour.

matplotlib is imported where it is needed; `pip install 'hf-dcut[bench]'` brings it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dcut.bench.analysis import accepted_lengths, draft_places
from hf_dcut.bench.cell import Cell
from hf_dcut.bench.surface import Surface
from hf_dcut.bench.trace import Trace
from hf_dcut.stats import STAGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKS = ("o", "s", "^", "D", "v", "x", "+", "*", "P", "<", ">", "h")
_DASHES = ("-", "--", "-.", ":")
_GREYS = ("0.0", "0.35", "0.6")
_HATCHES = ("", "//", "..", "xx", "\\\\", "--")
_SHOWN_REQUESTS, _SHOWN_STEPS, _BINS = 4, 40, 10


def acceptance_over_steps(traces: Mapping[str, Sequence[Trace]], path: Path) -> None:
    """Draws figure 2a: drafts accepted of a few requests, step by step, when every draft is verified."""
    panels = _panels(len(traces), path)
    for axes, (data, requests) in zip(panels, traces.items(), strict=True):
        for number, (trace, style) in enumerate(zip(requests[:_SHOWN_REQUESTS], _styles(), strict=False)):
            axes.plot(accepted_lengths(trace)[:_SHOWN_STEPS], label=f"request {number + 1}", **style)
        _name(axes, data, "step", "accepted drafts")
    _save(panels, path)


def step_seconds(surfaces: dict[str, Surface], path: Path) -> None:
    """Draws figure 2b and table 3: milliseconds of a step over the positions verified of each request."""
    panels = _panels(len(surfaces), path)
    for axes, (name, surface) in zip(panels, surfaces.items(), strict=True):
        for (batch, row), style in zip(surface.rows.items(), _styles(), strict=False):
            points = sorted((t / batch, s * 1e3) for t, s in row.items() if t)
            axes.plot(*zip(*points, strict=True), label=f"B = {batch}", **style)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        _name(axes, name, "verified positions per request", "step time (ms)")
    _save(panels, path)


def speed_over_concurrency(cells: Mapping[str, Sequence[Cell]], path: Path) -> None:
    """Draws figures 4 and 5: tokens/s of each method over the concurrency, a panel a data set."""
    panels = _panels(len(cells), path)
    for axes, (data, row) in zip(panels, cells.items(), strict=True):
        methods = list(dict.fromkeys(method for cell in row for method in cell.methods))
        for method, style in zip(methods, _styles(), strict=False):
            points = [(c.key.batch, c.speed(method)) for c in row if method in c.methods]
            points = sorted((b, s) for b, s in points if s is not None)
            if points:
                axes.plot(*zip(*points, strict=True), label=method, **style)
        axes.set_xscale("log", base=2)
        sizes = sorted({cell.key.batch for cell in row})
        axes.set_xticks(sizes, labels=[str(size) for size in sizes])
        _name(axes, data, "concurrency B (requests)", "output tokens/s")
    _save(panels, path)


def step_split(cells: dict[str, Cell], methods: Sequence[str], path: Path) -> None:
    """Draws figure 6: where the time of a step goes, a bar a method, a panel a data set."""
    panels = _panels(len(cells), path)
    for axes, (data, cell) in zip(panels, cells.items(), strict=True):
        shown = [method for method in methods if method in cell.methods and cell.total(method, "steps")]
        left = [0.0] * len(shown)
        for number, stage in enumerate(STAGES):
            parts = [1e3 * cell.step_seconds(method)[stage] for method in shown]
            grey = str(0.25 + 0.7 * number / len(STAGES))
            bars: dict[str, Any] = {"color": grey, "edgecolor": "black", "hatch": _HATCHES[number]}
            axes.barh(shown, parts, left=left, label=stage, **bars)
            left = [a + b for a, b in zip(left, parts, strict=True)]
        _name(axes, f"{data}, B = {cell.key.batch}", "time of a step (ms)", "method")
    _save(panels, path)


def confidence_against_acceptance(traces: Mapping[str, Sequence[Trace]], path: Path) -> None:
    """Draws figure 7: the share of drafts accepted over their survival, in ten bins."""
    panels = _panels(1, path)
    axes = panels[0]
    for (data, requests), style in zip(traces.items(), _styles(), strict=False):
        survival, accepted = draft_places(requests)
        bins = (survival * _BINS).long().clamp_max(_BINS - 1)
        filled = [b for b in range(_BINS) if bool((bins == b).any())]
        means = [(float(survival[bins == b].mean()), float(accepted[bins == b].float().mean())) for b in filled]
        axes.plot(*zip(*means, strict=True), label=data, **style)
    axes.plot([0, 1], [0, 1], color="0.8", linewidth=1)
    _name(axes, "", "survival (product of confidences)", "share of drafts accepted")
    _save(panels, path)


def _panels(count: int, path: Path) -> list[Axes]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{path.name} needs matplotlib: pip install 'hf-dcut[bench]'") from error
    figure = Figure(figsize=(4.8 * count, 3.4), layout="constrained")
    return list(figure.subplots(1, count, squeeze=False)[0])


def _styles() -> Iterator[dict[str, Any]]:
    """Returns an endless row of line styles that stay apart without colours."""
    looks = zip(cycle(_MARKS), cycle(_DASHES), cycle(_GREYS))
    return ({"marker": m, "linestyle": d, "color": g, "markersize": 4, "linewidth": 1.2} for m, d, g in looks)


def _name(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_axisbelow(True)
    axes.grid(color="0.9")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _save(panels: Sequence[Axes], path: Path) -> None:
    figure = panels[0].get_figure(root=True)
    assert figure is not None
    figure.savefig(path, dpi=150)
