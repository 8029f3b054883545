"""Measured methods as a table for people and as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from hf_dcut.bench.compare import Measured, equal_rows

HEADER = ("method", "tokens/s", "vs generate", "mean accepted", "kept", "drafted steps", "same output")


def table(measured: Sequence[Measured]) -> str:
    """Returns a Markdown table, one line a method.

    "vs generate" is the median of the rounds' ratios, "mean accepted" tokens per request and drafted step, "kept" the
    share of positions verified in drafted steps, "same output" how many prompts got exactly plain `generate`'s tokens.
    """
    base = measured[0]
    lines = [HEADER] + [_cells(entry, base) for entry in measured]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    text = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines]
    text.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(text)


def _cells(entry: Measured, base: Measured) -> tuple[str, ...]:
    accepted = entry.share("committed_tokens", "rows")
    kept, drafted = entry.share("verified_positions", "offered_positions"), entry.share("drafted_steps", "steps")
    return (
        entry.name,
        f"{entry.tokens_per_second:.1f}",
        f"{entry.ratio:.2f}",
        "-" if accepted is None else f"{accepted:.2f}",
        "-" if kept is None else f"{kept:.0%}",
        "-" if drafted is None else f"{drafted:.0%}",
        f"{equal_rows(entry, base)}/{len(base.sequences)}",
    )


def as_dict(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Returns the methods' numbers, JSON-able."""
    base = measured[0]
    return [
        {
            "method": entry.name,
            "tokens_per_second": entry.tokens_per_second,
            "ratio_to_generate": entry.ratio,
            "ratios": entry.ratios,
            "mean_accepted_tokens": entry.share("committed_tokens", "rows"),
            "kept_share": entry.share("verified_positions", "offered_positions"),
            "drafted_share": entry.share("drafted_steps", "steps"),
            "selection_share": _selection_share(entry),
            "equal_rows": equal_rows(entry, base),
            "rows": len(base.sequences),
        }
        for entry in measured
    ]


def machine() -> dict[str, Any]:
    """Returns what the numbers were measured on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "gpu": gpu,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _selection_share(entry: Measured) -> float | None:
    """Returns the share of step time that scores, budget and packing took."""
    total = sum(sum(stats.stage_seconds.values()) for stats in entry.stats)
    return sum(stats.stage_seconds["select"] for stats in entry.stats) / total if total else None
