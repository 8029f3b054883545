"""The paper's table 3, C(B, T), on a random model in Qwen3-8B's shape with a five-layer DFlash drafter, D = 15.

Each cell has three numbers: the measured seconds of a whole step, the target they should reach on an H200, and the
floor below which no implementation can come on this device.
"""

from __future__ import annotations

from typing import Any

from hf_dcut.assembly import attention_name
from hf_dcut.bench.gpu.ceilings import draft_work, verify_work
from hf_dcut.bench.gpu.clock import Clock
from hf_dcut.bench.gpu.rig import Rig
from hf_dcut.bench.gpu.shapes import chain_margin
from hf_dcut.bench.surface import published
from hf_dcut.budget import positions
from hf_dcut.config import PAPER_RATIOS
from hf_dcut.target import Target

# Milliseconds of a step with 25, 50, 75 and 100 % of the positions, on an H200.
TARGETS = {
    1: (6.0, 6.0, 6.0, 6.0),
    8: (6.3, 6.5, 6.7, 7.0),
    16: (6.8, 7.3, 8.2, 9.2),
    32: (8.0, 9.5, 12.0, 14.5),
    64: (11.5, 16.5, 22.5, 28.5),
}
# A plain step should take at most so many times what reading weights and K/V takes.
PLAIN_LIMIT = 1.4
_LEAST_MARGIN = 1.0


def costs(rig: Rig, clock: Clock) -> dict[str, Any]:
    """Returns the cells of the table, the plain steps, and what they are measured against."""
    margin, cells, plain, skipped = chain_margin(rig.model), [], [], []
    with Target(rig.model) as target:
        attention = attention_name(target)
    for rows in rig.sizes.batches:
        if (why := clock.late()) is not None:
            skipped.append({"what": f"B = {rows}", "why": why})
            continue
        cells += [_cell(rig, rows, share) for share in PAPER_RATIOS]
        plain.append(_plain(rig, rows))
    goals = [cell["within"] for cell in (*cells, *plain) if cell["within"] is not None]
    return {
        "shape": rig.sizes.chain,
        "draft_tokens": rig.sizes.block - 1,
        "drafter_layers": rig.sizes.layers,
        "dtype": str(rig.sizes.dtype),
        "attention": attention,
        "kv_length": rig.kv_length,
        "ceilings": rig.ceilings.to_dict(),
        "cells": cells,
        "plain": plain,
        "graphed": [rows for rows, graphed in rig.graphed.items() if graphed],
        "unsteady": len(rig.costs.unsteady),
        "targets": len(goals),
        "targets_met": sum(goals),
        "margin": margin,
        "passed": margin >= _LEAST_MARGIN,
        "skipped": skipped,
    }


def _cell(rig: Rig, rows: int, share: float) -> dict[str, Any]:
    """Returns a cell: B, the share, T, seconds, its target and the paper's (None at other sizes), and the floors."""
    depth = rig.sizes.block - 1
    total = positions(share, rows, depth)
    seconds, kv_length = rig.measured(rows)[total], rig.kv_length
    works = draft_work(rig.model, rig.drafter, rows, kv_length), verify_work(rig.model, rows, total, kv_length)
    paper = published()["table3"]["devices"]["h800"].get(str(rows), {}).get(str(total))
    known = not rig.tiny and rows in TARGETS
    target = TARGETS[rows][PAPER_RATIOS.index(share)] / 1e3 if known else None
    return {
        "B": rows,
        "share": share,
        "T": total,
        "seconds": seconds,
        "target": target,
        "paper": paper / 1e3 if known and paper else None,
        **rig.ceilings.floors(*works),
        "within": None if target is None else seconds <= target,
    }


def _plain(rig: Rig, rows: int) -> dict[str, Any]:
    """Returns the plain step of B requests and how many times the bandwidth floor it takes."""
    seconds = rig.measured(rows)[0]
    floors = rig.ceilings.floors(verify_work(rig.model, rows, rows, rig.kv_length))
    over = seconds / floors["bandwidth_floor"]
    within = None if rig.tiny else over <= PLAIN_LIMIT
    return {"B": rows, "seconds": seconds, **floors, "over_floor": over, "limit": PLAIN_LIMIT, "within": within}
