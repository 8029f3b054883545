"""Puts an engine together: checks, memory, caches, the bound drafter, the cost table.

Everything that can be refused is refused here, before memory is taken or a token is generated.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from typing import Any

from transformers import PreTrainedModel

from hf_dcut.adapters import adapters_of, unwrapped
from hf_dcut.cache import SlotCache
from hf_dcut.compiling import compiling
from hf_dcut.config import DCutConfig
from hf_dcut.cost_table import CostTable, open_table
from hf_dcut.drafters.base import BoundDrafter, Drafter
from hf_dcut.engine import Engine
from hf_dcut.fixed_step import FixedStep
from hf_dcut.graphs import Graphs, open_graphs
from hf_dcut.kernels import attention_path
from hf_dcut.lengths import check_length
from hf_dcut.machine import machine_fingerprint
from hf_dcut.memory import cells_ahead, check_memory, fitting_slots
from hf_dcut.prepacking import prepacked, runs_packed
from hf_dcut.profiling import kv_length_for, measure_costs, powers_of_two
from hf_dcut.skipping import keep_balance, last_balance
from hf_dcut.states import StateShape
from hf_dcut.stats import Stats
from hf_dcut.target import Target

logger = logging.getLogger(__name__)

# New tokens from which laying out weights anew pays: it takes about as long as five steps.
_PAYS_FROM = 12


@contextmanager
def open_engine(
    model: PreTrainedModel,
    drafter: Drafter | None,
    config: DCutConfig,
    slots: int,
    prompt: int,
    longest: int,
    stats: Stats | None = None,
    batch_sizes: Iterable[int] | None = None,
    fit: bool = False,
    facts: Mapping[str, object] | None = None,
) -> Iterator[Engine]:
    """Gives an engine for requests of this model; its memory and hooks are gone on leaving.

    Args:
        model: the target.
        drafter: who proposes; None decodes plainly.
        config: how drafts are cut.
        slots: requests that can be live at once.
        prompt, longest: tokens of the longest prompt, and of the longest request with what it generates.
        stats: where steps are counted.
        batch_sizes: what the cost table must know; powers of two up to `slots` when None.
        fit: whether there may be fewer slots where so many do not fit into memory.
        facts: what else must be the same in all processes that hold the model, by name.

    Raises:
        ValueError: model, drafter or lengths do not fit, or the processes were given different things.
        MemoryError: the slot caches do not fit, with the numbers.
    """
    check_length(model, prompt, longest)
    if drafter is not None:
        drafter.check(model)
    depth = _depth(drafter, config)
    length = longest + cells_ahead(drafter, config)
    taps = drafter.taps if drafter else ()
    packed = _prepacked(config, model, drafter, longest - prompt)
    with Target(model, taps) as target, compiling(config, target, drafter), packed:
        if target.ranks.size > 1:
            sizes = {"requests": (slots, prompt, longest)}
            target.ranks.check({**_facts(target, drafter, config), **sizes, **(facts or {})})
        if fit:
            slots = fitting_slots(target, drafter, slots, length, config.max_cache_bytes)
        check_memory(target, drafter, slots, length, config.max_cache_bytes)
        cache = SlotCache(target.shapes, slots, length, target.dtype, target.device)
        bound = drafter.bind(model, slots, length) if drafter else None
        stats = stats or Stats()
        at_once = sorted({*powers_of_two(slots), slots})
        graphs = open_graphs(config, FixedStep(target, cache, bound, depth), at_once, slots, longest - prompt)
        tree = _draws_trees(config, target, drafter, graphs)
        if drafter is not None and tree:
            depth = config.nodes(drafter.draft_tokens)
        costs, balance = None, 0.0
        if drafter is not None and bound is not None and config.budget == "auto":
            costs = _costs(config, depth, target, drafter, graphs, tree)
            if batch_sizes is None:
                # A table that was handed over is taken as it is.
                batch_sizes = () if costs is config.cost_table else powers_of_two(slots)
            stats.profile_seconds = _measure(costs, target, cache, bound, config, batch_sizes, longest, graphs, tree)
            balance = 0.0 if config.deterministic else target.ranks.share(partial(last_balance, model, drafter))
        engine = Engine(target, cache, bound, depth, config, costs, stats, graphs, target.ranks, balance, tree)
        yield engine
        if drafter is not None and engine.skip is not None and not config.deterministic:
            keep_balance(model, drafter, engine.skip.balance)


def warmup(
    model: PreTrainedModel,
    drafter: Drafter,
    batch_sizes: Iterable[int],
    dcut: DCutConfig | dict[str, Any] | bool = True,
    max_length: int = 512,
) -> CostTable:
    """Returns the cost table of this model and drafter, measuring what its file does not know yet.

    Args:
        model: the target.
        drafter: who proposes.
        batch_sizes: numbers of requests to measure.
        dcut: ratios and the place of the table, as for `generate`.
        max_length: tokens of the longest request expected, prompt included.

    Raises:
        ValueError: no or non-positive batch sizes, or a drafter that does not fit.
    """
    sizes = sorted(set(batch_sizes))
    if not sizes or sizes[0] < 1:
        raise ValueError(f"batch_sizes={sizes}: give one or more positive integers, such as [1, 4, 16]")
    config = DCutConfig.of(dcut)
    with open_engine(unwrapped(model), drafter, config, sizes[-1], 1, max_length, batch_sizes=sizes) as engine:
        if engine.costs is None:
            raise ValueError(f"dcut budget={config.budget!r} needs no cost table: warm up with budget='auto'")
        return engine.costs


def fingerprint(
    target: Target, drafter: Drafter, graphs: str | None = None, compiled: bool = False, tree: bool = False
) -> dict[str, Any]:
    """Returns everything the seconds of a step depend on, JSON-able.

    Args:
        target, drafter: whose step it is.
        graphs: where its budget comes from, if it is replayed as CUDA graphs.
        compiled: whether norms and MLPs are compiled.
        tree: whether its drafts are trees.
    """
    config = target.model.config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "architectures"):
        config.pop(volatile, None)
    adapters = adapters_of(target.model)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()
    return {
        **machine_fingerprint(target.device),
        "target": f"{type(target.model).__name__} {digest[:16]}",
        "dtype": str(target.dtype),
        "attention": attention_name(target),
        "tensor_parallel": target.ranks.size,
        "drafter": drafter.fingerprint(),
        "cuda_graphs": graphs,
        "compile": compiled,
        "draft_tree": tree,
        "prepacked": runs_packed(target.model),
        **({"adapters": adapters} if adapters else {}),
    }


def attention_name(target: Target) -> str:
    """Returns how packed attention runs for a target: "varlen", "triton", "packed sdpa", or several joined by "+".

    "packed torch" is what takes the place of SDPA in layers with soft caps or sinks.
    """
    plain, found = {False: "packed sdpa", True: "packed torch"}, set()
    for heads in target.heads:
        path = attention_path(target.device, target.dtype, *heads)
        found.add(plain[heads.extras] if path == "reference" else path)
    return "+".join(sorted(found))


def _depth(drafter: Drafter | None, config: DCutConfig) -> int:
    """Returns D: the drafter's block, or the first part of it that the config asks for."""
    if drafter is None:
        return 0
    wanted = config.draft_tokens
    if wanted is not None and wanted > drafter.draft_tokens:
        raise ValueError(f"dcut draft_tokens={wanted}: the drafter makes {drafter.draft_tokens}, give at most that")
    return wanted or drafter.draft_tokens


def _prepacked(
    config: DCutConfig, model: PreTrainedModel, drafter: Drafter | None, new_tokens: int
) -> AbstractContextManager[None]:
    """Returns the context in which linear layers are prepacked: all, but of what is compiled only the head.

    Left to the machine, they are where a request may have so many new tokens that it should pay.
    """
    wanted = False if config.prepack == "auto" and new_tokens < _PAYS_FROM else config.prepack
    head = model.get_output_embeddings()
    if config.compile:
        return prepacked([] if head is None else [head], wanted)
    return prepacked([model, *(drafter.networks if drafter else ())], wanted)


def _draws_trees(config: DCutConfig, target: Target, drafter: Drafter | None, graphs: Graphs | None) -> bool:
    """Returns whether drafts are trees.

    Raises:
        ValueError: they cannot be, but must.
    """
    if drafter is None or config.draft_tree is False:
        return False
    windows = any(isinstance(shape, StateShape) or shape.window is not None for shape in target.shapes)
    problems = {
        f"{drafter} proposes chains": not drafter.branches,
        "drawn drafts (proposals='sampled') are chains": config.proposals != "greedy",
        f"{type(target.model).__name__} has recurrent or sliding layers, which do not know them": windows,
        "steps recorded as CUDA graphs hold chains": graphs is not None,
    }
    found = [problem for problem, there in problems.items() if there]
    if found and config.draft_tree != "auto":
        raise ValueError(f"dcut draft_tree={config.draft_tree}: {'; '.join(found)}. Give 'auto' or False")
    return not found


def _costs(
    config: DCutConfig, depth: int, target: Target, drafter: Drafter, graphs: Graphs | None, tree: bool
) -> CostTable:
    """Returns the cost table: the one handed over, or what the first process's file knows."""

    def opened() -> CostTable:
        budget = config.cuda_graph_budget if graphs else None
        return open_table(config.cost_table, depth, fingerprint(target, drafter, budget, config.compile, tree))

    return opened() if isinstance(config.cost_table, CostTable) else target.ranks.share(opened)


def _facts(target: Target, drafter: Drafter | None, config: DCutConfig) -> dict[str, object]:
    """Returns what the processes that hold a model together must have in common, by name."""
    given = config.cost_table if isinstance(config.cost_table, CostTable) else None
    found = fingerprint(target, drafter) if drafter else machine_fingerprint(target.device)
    found["cost_table"] = "measured here" if given is None else (given.draft_tokens, given.seconds)
    found["dcut"], found["hf_dcut"] = asdict(replace(config, cost_table="auto")), metadata.version("hf-dcut")
    # Machines may differ in what makes them faster or slower, not in what decides tokens.
    return {name: fact for name, fact in found.items() if name not in ("device", "cores", "threads")}


def _measure(
    costs: CostTable,
    target: Target,
    cache: SlotCache,
    drafter: BoundDrafter,
    config: DCutConfig,
    sizes: Iterable[int],
    longest: int,
    graphs: Graphs | None,
    tree: bool,
) -> float:
    """Returns the seconds spent on entries that the table lacked."""
    seconds = measure_costs(costs, target, cache, drafter, config, sizes, kv_length_for(longest), graphs, tree)
    if seconds:
        logger.info("measured step costs in %.1f s (%s)\n%s", seconds, costs.path or "kept in memory", costs)
    return seconds
