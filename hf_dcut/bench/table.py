"""A cell as a Markdown table, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Sequence

from hf_dcut.bench import peers
from hf_dcut.bench.cell import Cell, Ratio
from hf_dcut.bench.methods import PLAIN

HEADER = ("method", "tokens/s", "vs generate", "mean accepted", "kept", "drafted steps", "same output")


def cell_table(cell: Cell) -> str:
    """Returns the methods of a cell, a line each.

    "vs generate" is the median of the rounds' ratios, "mean accepted" tokens per request and drafted step, "kept" the
    share of positions verified in drafted steps, "same output" how many answers are exactly plain `generate`'s. With
    three rounds or more, or without `generate`, a last column has the ratio to our plain decoding, with its bootstrap
    95 % interval if there is one.
    """
    plain = {method: cell.ratio(method, PLAIN) for method in cell.methods}
    wide = peers.GENERATE not in cell.methods or any(r is not None and r.low is not None for r in plain.values())
    rows = [[*_cells(cell, m), *([ratio_text(plain[m])] if wide else [])] for m in cell.methods]
    return markdown([*HEADER, *(["vs plain [95 %]"] if wide else [])], rows)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table with its columns aligned."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines]
    text.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(text)


def number(value: float | None, form: str = ".2f") -> str:
    """Returns a formatted number, "-" for none."""
    return "-" if value is None else format(value, form)


def ratio_text(ratio: Ratio | None) -> str:
    """Returns a ratio with its interval, "-" for none."""
    return "-" if ratio is None else str(ratio)


def _cells(cell: Cell, method: str) -> tuple[str, ...]:
    ratio = cell.ratio(method, peers.GENERATE)
    return (
        method,
        number(cell.speed(method), ".1f"),
        number(None if ratio is None else ratio.value),
        number(cell.mean_accepted(method)),
        number(cell.kept_share(method), ".0%"),
        number(cell.drafted_share(method), ".0%"),
        cell.same_output(method),
    )
