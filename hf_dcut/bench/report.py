"""A run as one Markdown page with figures: the paper's tables and figures, its numbers beside ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_dcut.bench import figures
from hf_dcut.bench.analysis import auroc, draft_places, equal_budgets, spearman
from hf_dcut.bench.cell import Cell
from hf_dcut.bench.claims import claims_table
from hf_dcut.bench.forecast import forecast_table
from hf_dcut.bench.journal import Journal
from hf_dcut.bench.methods import AUTO, PLAIN, TREE_AUTO
from hf_dcut.bench.policies import BUDGETS
from hf_dcut.bench.surface import Surface, published, surface_of
from hf_dcut.bench.table import cell_table, markdown, number, ratio_text
from hf_dcut.stats import STAGES
from hf_dcut.wording import counted

# The paper's main concurrency, and the model whose numbers stand beside ours.
_CONCURRENCY = 32
_MODEL = "Qwen3 8B"
# What a figure of step times shows.
_SPLIT = ("1.0", AUTO, TREE_AUTO)


def write_report(run: Path, folder: Path) -> Path:
    """Returns the page, README.md in the folder, after writing it and its figures.

    Raises:
        ValueError: a file that is no run, or one without a finished round.
        ImportError: matplotlib is missing.
    """
    journal = Journal.read(run)
    cells = journal.cells()
    if not cells:
        raise ValueError(f"{run} has no finished round yet: let the run go on with the same --out")
    folder.mkdir(parents=True, exist_ok=True)
    parts = [*_head(journal), *_claims(cells), *_table1(cells), *_table2(cells), *_table3(journal, folder)]
    parts += [*_speed_figures(cells, folder), *_splits(cells, folder)]
    if journal.recorded():
        parts += [*_recorded(journal, cells, folder)]
    parts += [*_positions(cells), *_everything(cells)]
    page = folder / "README.md"
    page.write_text("\n\n".join(parts) + "\n")
    return page


def _head(journal: Journal) -> Iterator[str]:
    header = journal.header
    plan, machine = header["plan"], header["machine"]
    yield f"# Benchmark of {plan['target']}"
    where = ", ".join(f"{k} {v}" for k, v in machine.items() if v is not None)
    yield f"Machine: {where}; hf-dcut {header['version']}, commit {header['commit'] or 'unknown'}."
    what = ", ".join(f"{k}={v}" for k, v in plan.items())
    yield f"Plan: {what}. Prompts left out as too long: {header['skipped_prompts']}."
    yield (
        "Tokens/s count new tokens over the whole call, prompts included, medians over rounds. Ratios are medians of "
        "the rounds' own ratios, in brackets bootstrap 95 % intervals over rounds (none with fewer than three). Ours "
        "replace a finished request by the next prompt; `generate` runs static batches, which drain. Mean accepted: "
        f"tokens per request and drafted step, the target's own included. The paper's numbers are those of {_MODEL} on "
        "other hardware: they are there for the pattern, not for the value."
    )
    alarms = [f"- {cell.key}: {alarm}" for cell in journal.cells() for alarm in cell.alarms()]
    yield "## Alarms\n\n" + ("\n".join(alarms) or "None.")


def _claims(cells: Sequence[Cell]) -> Iterator[str]:
    yield "## What must hold\n\n" + claims_table(cells)


def _table1(cells: Sequence[Cell]) -> Iterator[str]:
    """Yields table 1: methods and draft lengths over data sets at one concurrency."""
    greedy = [cell for cell in cells if not cell.key.temperature]
    sizes = {cell.key.batch for cell in greedy}
    if not sizes:
        return
    batch = _CONCURRENCY if _CONCURRENCY in sizes else max(sizes)
    chosen = {(cell.key.data, cell.key.draft_tokens): cell for cell in greedy if cell.key.batch == batch}
    data = list(dict.fromkeys(key[0] for key in chosen))
    rows = []
    for depth in sorted({key[1] for key in chosen}, reverse=True):
        methods = dict.fromkeys(m for (_, d), cell in chosen.items() if d == depth for m in cell.methods if m != PLAIN)
        for method in methods:
            values = [_tau_and_speed(chosen.get((name, depth)), method) for name in data]
            rows.append([f"{method} ({depth + 1})", *values])
    for row in published()["table1"]["rows"]:
        if row["model"] == _MODEL:
            tau, speed = row["mean_accepted"], row["speedup"]
            values = [f"{tau[name]:.2f}, {speed[name]:.2f}x" if name in tau else "-" for name in data]
            rows.append([f"paper: {row['method']}", *values])
    yield (
        f"## Table 1: mean accepted tokens, speed over plain decoding, B = {batch}\n\nIn brackets behind a method: its "
        "block, anchor included. 1.0 is DFlash, auto is D-cut.\n\n" + markdown(["method", *data], rows)
    )


def _tau_and_speed(cell: Cell | None, method: str) -> str:
    base = cell.base() if cell else None
    if cell is None or base is None or method not in cell.methods:
        return "-"
    return f"{number(cell.mean_accepted(method))}, {ratio_text(cell.ratio(method, base))}"


def _table2(cells: Sequence[Cell]) -> Iterator[str]:
    """Yields table 2: fixed budgets against auto over concurrency; the paper's as ratios to verifying everything."""
    greedy = [cell for cell in cells if not cell.key.temperature and "1.0" in cell.methods]
    depth = max((cell.key.draft_tokens for cell in greedy), default=0)
    greedy = [cell for cell in greedy if cell.key.draft_tokens == depth]
    if not greedy:
        return
    methods = [m for m in (*BUDGETS, TREE_AUTO) if any(m in cell.methods for cell in greedy)]
    rows = []
    for cell in greedy:
        best = max((cell.speed(m) or 0.0 for m in methods if m in cell.methods), default=0.0)
        rows.append([cell.key.data, str(cell.key.batch), *(_speed_and_ratio(cell, m, best) for m in methods)])
    devices = published()["table2"]["devices"]
    for data in dict.fromkeys(cell.key.data for cell in greedy):
        for device, table in devices.items():
            for batch in table["1.0"].get(data, {}):
                full = table["1.0"][data][batch]
                speeds = [table[m][data][batch] if m in table else None for m in methods]
                values = ["-" if speed is None else f"{speed:.0f} ({speed / full:.2f})" for speed in speeds]
                rows.append([f"paper, {device.upper()}: {data}", batch, *values])
    yield (
        "## Table 2: tokens/s of fixed budgets and auto\n\nIn brackets: over 1.0, which verifies every draft. Bold: "
        "the best of the row.\n\n" + markdown(["data", "B", *methods], rows)
    )


def _speed_and_ratio(cell: Cell, method: str, best: float) -> str:
    speed, ratio = (cell.speed(method), cell.ratio(method, "1.0")) if method in cell.methods else (None, None)
    if speed is None:
        return "-"
    text = f"**{speed:.1f}**" if speed == best else f"{speed:.1f}"
    return text + (f" ({ratio.value:.2f})" if ratio else "")


def _table3(journal: Journal, folder: Path) -> Iterator[str]:
    """Yields table 3 and figure 2b: the cost table."""
    depths = sorted({cell.key.draft_tokens for cell in journal.cells()}, reverse=True)
    surfaces = {f"this machine, D = {d}": s for d in depths if (s := journal.surface(d)) is not None}
    surfaces |= {f"paper, {name.upper()}": surface_of(name) for name in ("h20", "h800")}
    rows = [row for name, surface in surfaces.items() for row in _cost_rows(name, surface)]
    header = ["costs", "B", "plain", "25 %", "50 %", "75 %", "100 %"]
    yield "## Table 3: milliseconds of a step\n\n" + markdown(header, rows)
    figures.step_seconds(surfaces, folder / "step_seconds.png")
    yield "![Step time over verified positions per request (figure 2b)](step_seconds.png)"


def _cost_rows(name: str, surface: Surface) -> Iterator[list[str]]:
    for batch, row in surface.rows.items():
        full = batch * (surface.draft_tokens + 1)
        plain = f"{row[0] * 1e3:.2f}" if 0 in row else "-"
        shares = [surface.drafted(batch, max(batch, round(share * full))) for share in (0.25, 0.5, 0.75, 1.0)]
        yield [name, str(batch), plain, *(f"{s * 1e3:.2f}" for s in shares)]


def _speed_figures(cells: Sequence[Cell], folder: Path) -> Iterator[str]:
    """Yields figures 4 and 5: tokens/s over the concurrency, greedy and with a temperature."""
    depth = max(cell.key.draft_tokens for cell in cells)
    for heat in sorted({cell.key.temperature for cell in cells}):
        row: dict[str, list[Cell]] = {}
        for cell in cells:
            if cell.key.temperature == heat and cell.key.draft_tokens == depth:
                row.setdefault(cell.key.data, []).append(cell)
        if not row:
            continue
        name, title = (
            f"speed_t{heat:g}.png",
            f"Figure {5 if heat else 4}: tokens/s over concurrency, temperature {heat:g}",
        )
        figures.speed_over_concurrency(row, folder / name)
        yield f"## {title}\n\n![{title}]({name})"
        if heat:
            paper = published()["temperature1"]
            yield (
                f"In the paper, at temperature 1, averaged over B = 16 to 64: DFlash {paper['full_over_plain']}x and "
                f"D-cut {paper['auto_over_plain']}x of plain decoding."
            )


def _splits(cells: Sequence[Cell], folder: Path) -> Iterator[str]:
    """Yields figure 6: where the time of a step goes, at the largest batch of each data set."""
    largest: dict[str, Cell] = {}
    for cell in cells:
        ours = any(cell.total(method, "steps") for method in _SPLIT if method in cell.methods)
        if ours and not cell.key.temperature:
            old = largest.get(cell.key.data)
            if old is None or (cell.key.batch, cell.key.draft_tokens) > (old.key.batch, old.key.draft_tokens):
                largest[cell.key.data] = cell
    if not largest:
        return
    figures.step_split(largest, _SPLIT, folder / "step_split.png")
    rows = []
    for data, cell in largest.items():
        for method in (m for m in _SPLIT if m in cell.methods):
            seconds = cell.step_seconds(method)
            share = seconds["select"] / (sum(seconds.values()) or 1.0)
            rows.append([data, method, *(f"{1e3 * seconds[stage]:.2f}" for stage in STAGES), f"{share:.1%}"])
    low, high = published()["selector_share"]
    yield (
        "## Figure 6: where a step's time goes, in ms\n\n![Time of a step by stage](step_split.png)\n\n"
        + markdown(["data", "method", *STAGES, "select, share"], rows)
        + f"\n\nThe paper's selector takes {low:.1%} to {high:.1%} of a step at B = 64."
    )


def _recorded(journal: Journal, cells: Sequence[Cell], folder: Path) -> Iterator[str]:
    """Yields what the recorded drafts show: figures 2a and 7, equal budgets, the replay on other machines."""
    traces = {data: journal.traces(data) for data in journal.recorded()}
    figures.acceptance_over_steps(traces, folder / "acceptance_over_steps.png")
    yield (
        "## Figure 2: accepted drafts differ between requests and steps\n\n"
        "![Accepted drafts of four requests over steps](acceptance_over_steps.png)"
    )
    figures.confidence_against_acceptance(traces, folder / "confidence.png")
    paper = published()["confidence"]
    rows = []
    for data, requests in traces.items():
        survival, accepted = draft_places(requests)
        theirs = paper.get(data, {})
        ours = [f"{spearman(survival, accepted.double()):.3f}", number(auroc(survival, accepted), ".3f")]
        rows.append([data, str(len(survival)), *ours, *(str(theirs.get(k, "-")) for k in ("spearman", "auroc"))])
    header = ["data", "places", "Spearman", "AUROC", "paper: Spearman", "paper: AUROC"]
    yield (
        "## Figure 7: confidence predicts acceptance\n\n![Acceptance over survival](confidence.png)\n\n"
        + markdown(header, rows)
    )
    batch = max(cell.key.batch for cell in cells)
    rows = [
        [data, f"{e.share:.0%}", f"{e.uniform:.3f}", f"{e.cut:.3f}", str(e.gain)]
        for data, requests in traces.items()
        for e in equal_budgets(requests, batch)
    ]
    yield (
        f"## Equal budgets: uniform depth against the global cut, B = {batch}\n\nMean accepted tokens in a replay of "
        "the recorded drafts, which takes the steps of a real run. Intervals: bootstrap over requests.\n\n"
        + markdown(["data", "positions", "uniform", "global", "gain [95 %]"], rows)
    )
    trees = [TREE_AUTO] if journal.recorded(tree=True) else []
    policies = [*BUDGETS, *trees, "uniform-2", "tetris-128", "threshold-0.2"]
    costs = ("h20", "h800", "h20:4x", "measured")
    yield (
        "## Other machines, by replay\n\nTokens/s without reading prompts, in brackets over 1.0, from the recorded "
        "drafts and the paper's table 3; `h20:4x` is a hypothetical device with four times the compute. B = 256 lies "
        "beyond the tables and continues them on a line.\n\n" + forecast_table(journal, costs, (32, 256), policies)
    )


def _positions(cells: Sequence[Cell]) -> Iterator[str]:
    """Yields how often the draft at each place is accepted when all are verified."""
    rows: list[list[str]] = []
    depth = max(cell.key.draft_tokens for cell in cells)
    for cell in cells:
        if "1.0" in cell.methods and (shares := cell.acceptance("1.0")):
            shown = [f"{share:.0%}" for share in shares]
            rows.append([str(cell.key), *shown, *["-"] * (depth - len(shown))])
    if rows:
        header = ["cell", *map(str, range(1, depth + 1))]
        yield "## Acceptance by place of the draft, all verified\n\n" + markdown(header, rows)


def _everything(cells: Sequence[Cell]) -> Iterator[str]:
    yield "## Every cell"
    for cell in cells:
        size = f"{counted(cell.prompts, 'answer')} in {counted(len(cell.rounds), 'round')}"
        pulse = f"; the machine's pulse: {1e3 * cell.pulse:.0f} ms" if cell.pulse else ""
        yield f"### {cell.key}\n\n{size}{pulse}.\n\n{cell_table(cell)}"
        rows: list[list[Any]] = []
        for method in cell.methods:
            first, peak = cell.median(method, "first_token"), cell.median(method, "peak_bytes")
            margin = max((m or 0.0 for m in cell.numbers(method, "margin")), default=0.0)
            rows.append(
                [
                    method,
                    number(first, ".3f"),
                    number(None if peak is None else peak / 2**20, ".0f"),
                    number(margin, ".2g"),
                ]
            )
        yield markdown(["method", "first token (s)", "peak memory (MiB)", "largest margin at a difference"], rows)
