"""Tokens per second with drafts as good as the paper's. SYNTHETIC: the drafts come from an oracle.

A random model has no trained drafter. So each step does all the work of an untrained DFlash drafter, and then takes the
drafts of an oracle that errs as often as the paper's DFlash does on a data set (its table 1, Qwen3 8B, blocks of 16).
What is said is known beforehand, token for token.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hf_dcut.assembly import warmup
from hf_dcut.bench import peers
from hf_dcut.bench.drafter import profile_for
from hf_dcut.bench.gpu.clock import Clock
from hf_dcut.bench.gpu.priced import Priced
from hf_dcut.bench.gpu.rig import Rig
from hf_dcut.bench.gpu.shapes import random_prompts, successors
from hf_dcut.bench.methods import PLAIN, Setting, run
from hf_dcut.bench.rounds import warm_up
from hf_dcut.bench.surface import published
from hf_dcut.config import DCutConfig
from hf_dcut.cost_table import CostTable
from hf_dcut.drafters.oracle import OracleDrafter

SYNTHETIC = "synthetic: drafts of an oracle, at the price of an untrained DFlash drafter"
_BUDGETS = ("1.0", "0.25", "0.5", "auto")
# Whose tokens per second the paper tells, by concurrency.
_DATA = ("gsm8k", "mt-bench", "humaneval")
_MODEL, _METHOD, _DEPTH = "Qwen3 8B", "DFlash (16)", 15


def speed(rig: Rig, clock: Clock) -> dict[str, Any]:
    """Returns one entry for each batch size, method and data set, and whether all said what they must."""
    methods = [(peers.GENERATE, None), (PLAIN, None), *((budget, data) for data in _DATA for budget in _BUDGETS)]
    return _measured(rig, clock, [(batch, *method) for batch in rig.sizes.speed_batches for method in methods])


def compiled(rig: Rig, clock: Clock) -> dict[str, Any]:
    """Returns the same of plain `generate` with a static cache and a compiled forward: a part of its own.

    Compiling a large model takes about a minute and cannot be interrupted.
    """
    if rig.device.type != "cuda":
        return {"state": "not available", "reason": "compiled on CUDA devices only"}
    plan = [(batch, peers.COMPILED, None) for batch in rig.sizes.speed_batches]
    return _measured(rig, clock, plan, rig.sizes.compile_seconds)


def _measured(
    rig: Rig, clock: Clock, plan: Sequence[tuple[int, str, str | None]], needed: float = 0.0
) -> dict[str, Any]:
    """Returns the entries of a plan: batch size, method, data set; each needs so many seconds at least."""
    found: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    tables: dict[int, CostTable] = {}
    for batch, method, data in plan:
        if (why := clock.late(needed)) is not None:
            skipped.append({"what": f"{method}, B = {batch}" + (f", {data}" if data else ""), "why": why})
            continue
        prompts = random_prompts(batch, rig.sizes.prompt, rig.sizes.prompt, rig.sizes.chain["vocab_size"])
        setting = _setting(rig, prompts, data)
        if method == "auto":
            tables[batch] = tables.get(batch) or _table(rig, setting)
            setting = replace(setting, costs=copy.deepcopy(tables[batch]))
        warm_up(setting, prompts, [method])
        what = {"B": batch, "method": method, "data": data}
        found.append({**what, **_measure(rig, setting, prompts, method), "paper": _paper(method, data, batch)})
    passed = all(entry["right"] == entry["answers"] for entry in found)
    return {"note": SYNTHETIC, "entries": found, "passed": passed, "skipped": skipped}


def tokens_a_step(data: str, draft_tokens: int) -> float:
    """Returns what a step commits on a data set in the paper, all drafts verified; shrunk for shorter blocks."""
    (row,) = (r for r in published()["table1"]["rows"] if (r["model"], r["method"]) == (_MODEL, _METHOD))
    return 1 + (row["mean_accepted"][data] - 1) * draft_tokens / _DEPTH


def _setting(rig: Rig, prompts: Sequence[list[int]], data: str | None) -> Setting:
    sizes, depth = rig.sizes, rig.sizes.block - 1
    said = {tuple(prompt): _answer(rig, prompt, sizes.new_tokens + sizes.block) for prompt in prompts}
    oracle = OracleDrafter(said, depth, profile_for(tokens_a_step(data or _DATA[0], depth), depth))
    drafter = Priced(oracle, rig.drafter)
    return Setting(rig.model, drafter, len(prompts), sizes.new_tokens, sizes.prompt, draft_tokens=depth)


def _answer(rig: Rig, prompt: Sequence[int], count: int) -> list[int]:
    return successors(prompt[-1], count, rig.sizes.chain["vocab_size"])


def _table(rig: Rig, setting: Setting) -> CostTable:
    """Returns what steps of this batch cost at the length of these requests."""
    config = DCutConfig(cost_table=CostTable(rig.sizes.block - 1))
    return warmup(rig.model, setting.drafter, [setting.batch], config, setting.width + setting.max_new_tokens)


def _measure(rig: Rig, setting: Setting, prompts: Sequence[list[int]], method: str) -> dict[str, Any]:
    """Returns tokens per second, prompts included, and how many answers are right."""
    outcome = run(method, setting, prompts)
    pairs = zip(outcome.sequences, prompts, strict=True)
    right = sum(said == _answer(rig, prompt, setting.max_new_tokens) for said, prompt in pairs)
    stats = outcome.stats
    return {
        "synthetic": method in _BUDGETS,
        "tokens_per_second": outcome.tokens / outcome.seconds,
        "answers": len(prompts),
        "right": right,
        "tokens_a_step": stats.mean_accepted_tokens if stats and stats.rows else None,
        "kept_share": stats.kept_share if stats and stats.rows else None,
        "drafted_share": stats.drafted_share if stats else None,
    }


def _paper(method: str, data: str | None, batch: int) -> float | None:
    """Returns the paper's tokens per second on an H800, where it tells them."""
    table = published()["table2"]["devices"]["h800"]
    return table.get(method, {}).get(data, {}).get(str(batch))
