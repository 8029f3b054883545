"""What the numbers must show, cell by cell, each with its interval."""

from __future__ import annotations

from collections.abc import Sequence

from hf_dcut.bench.cell import Cell, Ratio
from hf_dcut.bench.methods import AUTO, PLAIN, TREE_AUTO
from hf_dcut.bench.table import markdown, number

# auto over the best fixed budget, over plain decoding, and from this batch on over verifying everything.
OF_BEST, OF_PLAIN, CROWDED = 0.97, 0.95, 8
# auto over plain decoding where the device has time to spare.
FEW, GAIN_WHEN_FEW = (1, 4), 1.3


def claims_table(cells: Sequence[Cell]) -> str:
    """Returns a Markdown table: auto, with chains and with trees, against the best fixed budget, plain and 1.0.

    "yes" where the median reaches the mark, "no" otherwise; "?" behind it where the interval holds the mark too. The
    share of drafted steps stands beside, since a rule that never drafts would pass the second mark.
    """
    rows = [_row(cell, method) for cell in cells for method in (AUTO, TREE_AUTO) if method in cell.methods]
    header = [
        "cell",
        "method",
        f"over the best fixed budget, at least {OF_BEST}",
        f"over plain, at least {OF_PLAIN} ({GAIN_WHEN_FEW} at B = 1 and 4, greedy)",
        f"over 1.0, above 1 from B = {CROWDED}",
        "drafted steps",
    ]
    return markdown(header, rows) if rows else "No cell has the method auto."


def _row(cell: Cell, method: str) -> list[str]:
    """Returns what a cell says of a method that chooses its budget."""
    best, batch = cell.best_fixed(trees=method == TREE_AUTO), cell.key.batch
    of_best = cell.ratio(method, best) if best else None
    of_plain, of_full = cell.ratio(method, PLAIN), cell.ratio(method, "1.0")
    plain_mark = GAIN_WHEN_FEW if batch in FEW and not cell.key.temperature else OF_PLAIN
    return [
        str(cell.key),
        method,
        f"{best or '-'}: {verdict(of_best, OF_BEST)}",
        verdict(of_plain, plain_mark),
        verdict(of_full, 1.0) if batch >= CROWDED else f"{of_full or '-'}",
        number(cell.drafted_share(method), ".0%"),
    ]


def verdict(ratio: Ratio | None, mark: float) -> str:
    """Returns a ratio and whether it reaches a mark."""
    if ratio is None:
        return "-"
    said = "yes" if ratio.value >= mark else "no"
    doubt = ratio.low is None or ratio.high is None or ratio.low < mark <= ratio.high
    return f"{ratio}, {said}{'?' if doubt else ''}"
