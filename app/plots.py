"""Traces as SVG. The colours mean the same everywhere, and none of them stands alone:

ink      the target's own token: a line at the foot of every cell
orange   drafted, verified, accepted
blue     drafted, verified, rejected; darker where more was kept
outline  drafted and cut: never verified
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hf_dcut.app import charts
from hf_dcut.app.charts import Frame
from hf_dcut.app.curve import Curve
from hf_dcut.app.trace import Draft, Step, Trace

# How many shades the kept depth has.
_SHADES = 4
_WIDTH, _LEFT, _RIGHT = 960, 44, 14
_STRIP = 74
# Budgets on the axis of a curve that have room for their names.
_MOST_NAMES = 6


def heat_map(trace: Trace) -> str:
    """Returns the map request x step: each cell shows the depth that was drafted, kept and accepted.

    As wide as plain decoding would be long, so that the empty right end is what was saved.
    """
    rows = len(trace.answers)
    pitch, gap = _row_size(rows, trace.depth)
    columns = max(trace.new_tokens - 1, len(trace.steps), 1)
    column = (_WIDTH - _LEFT - _RIGHT) / columns
    top, height = 22, rows * pitch
    cells = _Cells(trace.depth, column, pitch - gap, top + pitch - gap, pitch)
    for index, step in enumerate(trace.steps):
        for row in step.rows:
            x = _LEFT + index * column
            cells.add(x, row.request, len(row.drafts), row.kept, row.accepted)
    labels = "".join(
        charts.label(_LEFT - 10, top + r * pitch + pitch - gap - 1, str(r + 1), "end")
        for r in range(rows)
        if rows <= 16 or r % 2 == 0
    )
    body = [
        charts.label(_LEFT, 12, "one row a request, one column a step", "start"),
        labels,
        cells.paths(),
        cells.seams(rows, _LEFT + len(trace.steps) * column),
        _finish(trace, column, top, height),
    ]
    bottom = top + height + 4
    if trace.depth:
        body.append(_budget_strip(trace, column, bottom))
        bottom += _STRIP
    body.append(_step_axis(columns, column, bottom))
    return charts.svg(_WIDTH, bottom + 26, "".join(body), _describe(trace), "heat")


def _row_size(rows: int, depth: int) -> tuple[float, float]:
    """Returns the height of a row, with its gap, and of the gap."""
    if not depth:
        return 14, 6
    return (40, 8) if rows <= 8 else (26, 5) if rows <= 16 else (17, 3)


class _Cells:
    """Collects the cells' rectangles in one path a colour, which keeps the page fast at thousands of cells."""

    def __init__(self, depth: int, column: float, height: float, foot: float, pitch: float):
        self.unit = (height - 3) / max(depth, 1)
        self.depth, self.foot, self.pitch = max(depth, 1), foot, pitch
        self.width = max(1.0, column - min(2.0, column / 5))
        self.drawn: dict[str, list[str]] = {}

    def add(self, x: float, request: int, drafted: int, kept: int, accepted: int) -> None:
        """Adds one cell: the target's own token at its foot, then the drafts, first draft lowest."""
        foot = self.foot + request * self.pitch
        self._rect("own", x, foot, 2)
        top = foot - 3
        shade = (kept * _SHADES - 1) // self.depth
        for kind, first, last in (
            ("accepted", 0, accepted),
            (f"kept{shade}", accepted, kept),
            ("cut", kept, drafted),
        ):
            if last > first:
                self._rect(kind, x, top - first * self.unit, (last - first) * self.unit)

    def _rect(self, kind: str, x: float, bottom: float, height: float) -> None:
        left, foot, tall, wide = (f"{n:.1f}".removesuffix(".0") for n in (x, bottom, height, self.width))
        self.drawn.setdefault(kind, []).append(f"M{left} {foot}v-{tall}h{wide}v{tall}z")

    def paths(self) -> str:
        """Returns the paths, what was cut at the back."""
        order = ["cut", *(f"kept{shade}" for shade in range(_SHADES)), "accepted", "own"]
        return "".join(
            f'<path class="{kind}" d="{"".join(self.drawn[kind])}"/>' for kind in order if kind in self.drawn
        )

    def seams(self, rows: int, right: float) -> str:
        """Returns lines between the tokens of a block, where blocks are tall enough to count them."""
        if self.unit < 2.5:
            return ""
        heights = [self.foot + r * self.pitch - 3 - n * self.unit for r in range(rows) for n in range(1, self.depth)]
        return f'<path class="seam" d="{"".join(f"M{_LEFT} {y:.1f}H{right:.1f}" for y in heights)}"/>'


def _finish(trace: Trace, column: float, top: float, height: float) -> str:
    """Returns the line behind the last step and the steps that plain decoding would still need."""
    if not trace.steps:
        return ""
    x = _LEFT + len(trace.steps) * column + 1
    line = f'<path class="now" d="M{x:.1f} {top - 4}v{height + 4}"/>'
    saved = trace.longest - 1 - len(trace.steps)
    if not trace.done or saved < 1:
        return line
    return line + charts.label(x + 8, top + height / 2, f"{saved} steps fewer than plain decoding", "start", "strong")


def _budget_strip(trace: Trace, column: float, top: float) -> str:
    """Returns the share of all positions that each step verified, with the anchors as the least there can be."""
    base, height = top + _STRIP - 16, _STRIP - 30
    parts = [
        charts.label(
            _LEFT, top + 10, "share of positions verified in each step; ○ a plain step, which drafts nothing", "start"
        )
    ]
    for share in (0.5, 1.0):
        y = base - share * height
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(charts.label(_LEFT - 6, y + 4, f"{share:.0%}", "end"))
    bars, plain = [], []
    for index, step in enumerate(trace.steps):
        x, width = _LEFT + index * column, max(1.0, column - min(2.0, column / 5))
        if step.budget is None:
            plain.append(f"M{x + width / 2:.1f} {base - 3:.1f}m-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0")
        else:
            tall = step.verified / step.offered * height
            bars.append(f"M{x:.1f} {base:.1f}v-{tall:.1f}h{width:.1f}v{tall:.1f}z")
    parts.append(f'<path class="share" d="{"".join(bars)}"/><path class="plainstep" d="{"".join(plain)}"/>')
    parts.append(f'<path class="axis" d="M{_LEFT} {base}H{_WIDTH - _RIGHT}"/>')
    return "".join(parts)


def _step_axis(columns: int, column: float, top: float) -> str:
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100) if columns / n <= 16)
    marks = range(every, columns + 1, every)
    ticks = "".join(charts.label(_LEFT + (n - 0.5) * column, top + 10, str(n), "middle") for n in marks)
    return ticks + charts.label(_LEFT - 10, top + 10, "step", "end")


def _describe(trace: Trace) -> str:
    if not trace.steps:
        return "Heat map of requests and steps, still empty."
    step = trace.steps[-1]
    rows = ", ".join(f"request {row.request + 1}: {row.kept} kept, {row.accepted} accepted" for row in step.rows)
    return (
        f"Heat map of {len(trace.answers)} requests over {len(trace.steps)} steps. Of {trace.drafted} drafts "
        f"{trace.kept} were verified and {trace.accepted} accepted. Latest step: {rows}."
    )


def cost_curve(trace: Trace, number: int | None = None) -> str:
    """Returns what each budget promised in one step, over what it costs, with the budget that was chosen.

    Args:
        trace: the run.
        number: of the step, from 0; the latest that drafted when None.
    """
    steps = trace.steps if number is None else trace.steps[: number + 1]
    drafted = [step for step in steps if step.curve is not None]
    if not drafted or (number is not None and steps[-1].curve is None):
        return charts.empty(460, 330, _why_no_curve(trace, steps))
    step = drafted[-1]
    assert step.curve is not None
    curve = step.curve
    span = (curve.totals[0], curve.totals[-1])
    # Where few drafts are left, several shares are the same number of positions: the first of them is chosen.
    candidates = {total: share for share, total in reversed(curve.candidates)}
    # There is room for the names of a few: of many, the quarters are named.
    named = {t for t, share in candidates.items() if len(candidates) <= _MOST_NAMES or share * 4 % 1 == 0}
    rates, costs = [*curve.rates, curve.plain_rate], [s * 1e3 for s in curve.seconds]
    upper = Frame(54, 34, 386, 130, span, (0, max(rates) * 1.12))
    seen = [(s.verified, s.seconds * 1e3) for s in drafted if len(s.rows) == curve.requests]
    lower = Frame(54, 206, 386, 84, span, (0, max([*costs, curve.plain * 1e3]) * 1.35))
    body = [
        charts.label(54, 16, "expected tokens a second", "start", "strong"),
        upper.grid(3),
        upper.level(curve.plain_rate, "plain", f"plain step {curve.plain_rate:.0f}"),
        upper.line(zip(curve.totals, curve.rates, strict=True), "rate"),
        *(_candidate(upper, curve, total, share if total in named else None) for total, share in candidates.items()),
        _choice(upper, curve, step),
        charts.label(54, 196, "milliseconds a step takes", "start", "strong"),
        lower.grid(2),
        lower.line(zip(curve.totals, costs, strict=True), "cost"),
        "".join(lower.dot(t, min(ms, lower.y_range[1]), 2.5, "past") for t, ms in seen),
        lower.dot(curve.chosen, costs[curve.at(curve.chosen)], 5, "chosen"),
        lower.x_axis(f"positions verified, of {step.offered}", least=1),
    ]
    share = step.verified / step.offered
    text = (
        f"Expected tokens a second for each number of verified positions from {span[0]} to {span[1]}. "
        f"Chosen: {curve.chosen} positions, {share:.0%}, {curve.rates[curve.at(curve.chosen)]:.0f} tokens a second; "
        f"a plain step makes {curve.plain_rate:.0f}."
    )
    return charts.svg(460, 330, "".join(body), text, "curve")


def _candidate(frame: Frame, curve: Curve, total: int, share: float | None) -> str:
    """Returns the dot of a budget, and its name if there is room for it."""
    mark = frame.dot(total, curve.rates[curve.at(total)], 3.5, "candidate")
    return mark + ("" if share is None else charts.label(frame.x(total), frame.bottom + 13, f"{share:.0%}", "middle"))


def _choice(frame: Frame, curve: Curve, step: Step) -> str:
    rate = curve.rates[curve.at(curve.chosen)]
    x, y = frame.x(curve.chosen), frame.y(rate)
    end = "end" if x > frame.left + frame.width * 0.6 else "start"
    words = f"chosen: {step.budget:.0%}" if step.budget else "chosen"
    offset = -9 if end == "end" else 9
    return f'<path class="drop" d="M{x:.1f} {y:.1f}V{frame.bottom}"/>' + (
        frame.dot(curve.chosen, rate, 6, "chosen") + charts.label(x + offset, y - 9, words, end, "strong")
    )


def _why_no_curve(trace: Trace, steps: Sequence[Step]) -> str:
    if steps and steps[-1].budget is None and trace.depth:
        return "This step was plain: drafting did not pay, so it was left out."
    if steps and trace.depth:
        return "A fixed budget needs no cost curve; none is measured for this drafter yet."
    return "The curve appears with the first drafted step."


def ranking(step: Step) -> str:
    """Returns all drafts of the batch in one step by survival, best first, with the line where they were cut."""
    drafts = sorted((d for row in step.rows for d in row.drafts), key=lambda d: (-d.survival, not d.kept))
    if not drafts:
        return ""
    frame = Frame(50, 34, 596, 190, (0, len(drafts)), (0, 1))
    width = frame.width / len(drafts)
    drawn: dict[str, list[str]] = {}
    for place, draft in enumerate(drafts):
        x, tall = frame.left + place * width, max(1.5, draft.survival * frame.height)
        kind = _kind(draft)
        drawn.setdefault(kind, []).append(
            f"M{x:.1f} {frame.bottom}v-{tall:.1f}h{max(1.0, width - 1.5):.1f}v{tall:.1f}z"
        )
    kept = sum(draft.kept for draft in drafts)
    x = frame.left + kept * width - 0.75
    end = "start" if kept < len(drafts) * 0.7 else "end"
    words = f"verified {kept}, cut {len(drafts) - kept}"
    body = [
        charts.label(50, 14, "survival of every draft in the batch, best first", "start", "strong"),
        frame.grid(2, "{:.0%}"),
        *(f'<path class="{kind}" d="{"".join(paths)}"/>' for kind, paths in drawn.items()),
        f'<path class="knife" d="M{x:.1f} {frame.top - 8}V{frame.bottom + 6}"/>',
        charts.label(x + (8 if end == "start" else -8), frame.top + 4, words, end, "strong"),
        f'<path class="axis" d="M{frame.left} {frame.bottom}h{frame.width}"/>',
    ]
    accepted = sum(draft.accepted for draft in drafts)
    text = f"{len(drafts)} drafts ranked by survival: {kept} verified, of which {accepted} accepted; the rest is cut."
    return charts.svg(660, 236, "".join(body), text, "ranking")


def _kind(draft: Draft) -> str:
    return "accepted" if draft.accepted else "kept2" if draft.kept else "cut"


def race(traces: Sequence[Trace]) -> str:
    """Returns tokens over seconds of each method, on one clock although they ran one after the other."""
    lines = [(trace.method, _progress(trace)) for trace in traces if trace.steps]
    if not lines:
        return charts.empty(_WIDTH, 240, "The race begins with the first step.")
    seconds = max(points[-1][0] for _, points in lines) * 1.25
    tokens = max(points[-1][1] for _, points in lines) * 1.1
    frame = Frame(54, 30, 890, 180, (0, seconds), (0, tokens))
    body = [charts.label(54, 14, "tokens generated by all requests", "start", "strong"), frame.grid(3)]
    for index, (method, points) in enumerate(lines):
        x, y = points[-1]
        body.append(frame.line(points, f"racer{index}"))
        body.append(frame.dot(x, y, 4, f"racer{index}"))
        body.append(charts.label(frame.x(x) + 8, frame.y(y) + 4 + 15 * (index - 1), f"{method} {x:.1f} s", "start"))
    body.append(frame.x_axis("seconds"))
    text = "Tokens over time. " + "; ".join(f"{m}: {p[-1][1]:.0f} tokens after {p[-1][0]:.1f} s" for m, p in lines)
    return charts.svg(_WIDTH, 254, "".join(body), text, "race")


def _progress(trace: Trace) -> list[tuple[float, float]]:
    """Returns (seconds, tokens) after the prompts and after each step."""
    stepped = sum(step.seconds for step in trace.steps)
    seconds = max(0.0, trace.seconds - stepped)
    tokens = float(trace.tokens - sum(step.new_tokens for step in trace.steps))
    points = [(0.0, 0.0), (seconds, tokens)]
    for step in trace.steps:
        seconds, tokens = seconds + step.seconds, tokens + step.new_tokens
        points.append((seconds, tokens))
    return points


def sheet(plots: Iterable[str]) -> str:
    """Returns plots under each other in one SVG file that needs nothing else."""
    return charts.stacked(plots)
