"""Tokens per second with drafts as good as the paper's. SYNTHETIC: the drafts come from an oracle.

A random model has no trained drafter. So each step does all the work of an untrained DFlash drafter, and then takes the
drafts of an oracle that errs as often as the paper's DFlash does on a data set (its table 1, Qwen3 8B, blocks of 16).
What is said is known beforehand, token for token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_dcut.assembly import open_engine
from hf_dcut.bench import peers
from hf_dcut.bench.drafter import profile_for
from hf_dcut.bench.gpu.clock import Clock
from hf_dcut.bench.gpu.rig import Rig
from hf_dcut.bench.gpu.shapes import random_prompts, successors
from hf_dcut.bench.methods import PLAIN
from hf_dcut.bench.policies import rule_of
from hf_dcut.bench.surface import published
from hf_dcut.config import DCutConfig
from hf_dcut.engine import Engine
from hf_dcut.requests import Request
from hf_dcut.stats import Stats

SYNTHETIC = "synthetic: drafts of an oracle, at the price of an untrained DFlash drafter"
# What stands behind a rule in the name of a method: options of `DCutConfig`.
_OPTIONS: dict[str, dict[str, Any]] = {"": {}, "read": {"cuda_graph_budget": "read"}, "compiled": {"compile": True}}
_BUDGETS = ("1.0", "0.25", "0.5", "auto", "auto, read")
_COMPILED = ("auto, compiled", "plain, compiled")
# Whose tokens per second the paper tells, by concurrency.
_DATA = ("gsm8k", "mt-bench", "humaneval")
_MODEL, _METHOD, _DEPTH = "Qwen3 8B", "DFlash (16)", 15
_WARM_UP = 4

Prompts = Sequence[list[int]]


@dataclass(frozen=True)
class Round:
    """What one method made of the prompts.

    Attributes:
        seconds: prompts included; without setting up.
        answers: new tokens of each prompt.
        data: whose acceptance the oracle had; None without drafts.
        stats: of our steps; None for upstream's methods.
        graphed: whether steps were replayed as CUDA graphs.
    """

    seconds: float
    answers: Prompts
    data: str | None = None
    stats: Stats | None = None
    graphed: bool = False


def speed(rig: Rig, clock: Clock) -> dict[str, Any]:
    """Returns one entry for each batch size, method and data set, and whether all said what they must."""
    methods = (peers.GENERATE, PLAIN, *_BUDGETS)
    return _measured(rig, clock, [(batch, method) for batch in rig.sizes.speed_batches for method in methods])


def compiled(rig: Rig, clock: Clock) -> dict[str, Any]:
    """Returns the same with compiled norms and MLPs, and of plain `generate` with static cache and compiled forward.

    A part of its own: compiling a large model takes about a minute and cannot be interrupted.
    """
    if rig.device.type != "cuda":
        return {"state": "not available", "reason": "compiled on CUDA devices only"}
    plan = [(rig.sizes.speed_batches[0], method) for method in _COMPILED]
    plan += [(batch, peers.COMPILED) for batch in rig.sizes.speed_batches]
    return _measured(rig, clock, plan, rig.sizes.compile_seconds)


def tokens_a_step(data: str, draft_tokens: int) -> float:
    """Returns what a step commits on a data set in the paper, all drafts verified; shrunk for shorter blocks."""
    (row,) = (r for r in published()["table1"]["rows"] if (r["model"], r["method"]) == (_MODEL, _METHOD))
    return 1 + (row["mean_accepted"][data] - 1) * draft_tokens / _DEPTH


def _measured(rig: Rig, clock: Clock, plan: Sequence[tuple[int, str]], needed: float = 0.0) -> dict[str, Any]:
    """Returns the entries of a plan of batch sizes and methods, each of which needs so many seconds at least."""
    found: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    vocabulary, width = rig.sizes.chain["vocab_size"], rig.sizes.prompt
    for batch, method in plan:
        if (why := clock.late(needed)) is not None:
            skipped.append({"what": f"{method}, B = {batch}", "why": why})
            continue
        prompts = random_prompts(batch, width, width, vocabulary)
        expected = [successors(prompt[-1], rig.sizes.new_tokens, vocabulary) for prompt in prompts]
        rounds = _upstream if method in peers.PEERS else _ours
        found += [_entry(batch, method, turn, expected) for turn in rounds(rig, method, prompts)]
    passed = all(entry["right"] == entry["answers"] for entry in found)
    return {"note": SYNTHETIC, "entries": found, "passed": passed, "skipped": skipped}


def _upstream(rig: Rig, method: str, prompts: Prompts) -> Iterator[Round]:
    """Yields what a method of Transformers does, the second time."""
    options = peers.Options(len(prompts), rig.sizes.new_tokens, 0.0, rig.sizes.prompt, None)
    peers.run(method, rig.model, prompts, options)
    seconds, answers, _ = peers.run(method, rig.model, prompts, options)
    yield Round(seconds, answers)


def _ours(rig: Rig, method: str, prompts: Prompts) -> Iterator[Round]:
    """Yields what one engine does, for each data set whose acceptance the oracle takes on."""
    longest, depth = rig.sizes.prompt + rig.sizes.new_tokens, rig.sizes.block - 1
    drafter, oracle = rig.oracle_drafter(rig.model, rig.drafter, longest)
    (rule, _, option), batch = method.partition(", "), len(prompts)
    proposer = None if rule == PLAIN else drafter
    options = {"cost_table": "off", "cuda_graph_batch_sizes": (batch,), **_OPTIONS[option]}
    config = DCutConfig(budget=rule_of(rule)[0], **options)
    with open_engine(rig.model, proposer, config, batch, rig.sizes.prompt, longest, batch_sizes=[batch]) as engine:
        _generate(engine, prompts, _WARM_UP)
        for data in (None,) if rule == PLAIN else _DATA:
            if data is not None:
                profile = profile_for(tokens_a_step(data, depth), depth)
                oracle.profile.copy_(torch.tensor(profile))
            engine.stats = Stats()
            begin = time.perf_counter()
            answers = _generate(engine, prompts, rig.sizes.new_tokens)
            yield Round(time.perf_counter() - begin, answers, data, engine.stats, engine.replaying.graphs is not None)


def _generate(engine: Engine, prompts: Prompts, new_tokens: int) -> list[list[int]]:
    """Returns the answers to the prompts, once the device is done with them."""
    requests = [Request(id=i, prompt=p, max_new_tokens=new_tokens, seed=i) for i, p in enumerate(prompts)]
    for _ in engine.run(requests):
        pass
    if engine.target.device.type == "cuda":
        torch.cuda.synchronize(engine.target.device)
    return [request.tokens for request in requests]


def _entry(batch: int, method: str, turn: Round, expected: Prompts) -> dict[str, Any]:
    """Returns tokens per second, prompts included, how many answers are right, and the paper's tokens per second."""
    stats = turn.stats
    paper = published()["table2"]["devices"]["h800"].get(method, {}).get(turn.data, {})
    return {
        "B": batch,
        "method": method,
        "data": turn.data,
        "graphed": turn.graphed,
        "synthetic": turn.data is not None,
        "tokens_per_second": sum(map(len, turn.answers)) / turn.seconds,
        "answers": len(expected),
        "right": sum(a == b for a, b in zip(turn.answers, expected, strict=True)),
        "tokens_a_step": stats.mean_accepted_tokens if stats and stats.rows else None,
        "kept_share": stats.kept_share if stats and stats.rows else None,
        "drafted_share": stats.drafted_share if stats else None,
        "paper": paper.get(str(batch)),
    }
