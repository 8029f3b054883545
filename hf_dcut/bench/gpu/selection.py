"""Seconds of scores, budget and packing, and their share of a step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hf_dcut.bench.gpu.clock import Clock
from hf_dcut.bench.gpu.rig import Rig
from hf_dcut.bench.kernel_check import host_seconds
from hf_dcut.bench.surface import published
from hf_dcut.config import PAPER_RATIOS
from hf_dcut.selecting import select
from hf_dcut.types import Batch, Drafts


def selection(rig: Rig, clock: Clock) -> dict[str, Any]:
    """Returns seconds of a selection by batch size, its host read included, and its share of the fullest step."""
    depth, device = rig.sizes.block - 1, rig.device
    found, skipped = [], []
    for rows in rig.sizes.batches:
        if (why := clock.late()) is not None:
            skipped.append({"what": f"B = {rows}", "why": why})
            continue
        whole = rig.measured(rows)[rows * (depth + 1)]
        confidence = torch.rand(rows, depth, generator=torch.Generator().manual_seed(0)).sqrt().to(device)
        drafts = Drafts.chain(torch.ones(rows, depth, dtype=torch.int64, device=device), confidence)
        slot, full = torch.arange(rows, device=device), torch.full((rows,), depth, device=device)
        batch = Batch(slot, full, full, full, slot, slot * 0)
        run = partial(select, drafts, batch, PAPER_RATIOS, rig.costs, 2 * depth)
        seconds = host_seconds(run, device)
        shares = {"share_p50": seconds["p50"] / whole, "share_p95": seconds["p95"] / whole}
        found.append({"B": rows, **seconds, **shares})
    return {"rows": found, "paper_share": published()["selector_share"], "passed": True, "skipped": skipped}
