"""Measuring the cost table: whole steps on the live model, with made-up requests in the slots.

Runs before the first prompt is read, so that nothing it leaves in the slots matters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from hf_dcut.budget import positions
from hf_dcut.cache import SlotCache
from hf_dcut.config import PAPER_RATIOS, DCutConfig
from hf_dcut.cost_table import CostTable
from hf_dcut.drafters.base import BoundDrafter
from hf_dcut.drafters.wrapping import BoundWrapped
from hf_dcut.engine import Engine
from hf_dcut.graphs import Graphs
from hf_dcut.requests import Request
from hf_dcut.stats import Stats
from hf_dcut.target import Target
from hf_dcut.types import Batch, Drafts

# Few enough that calls of many lengths share their entries.
_KV_LENGTHS = tuple(1 << k for k in range(12))
# Shares of the positions at which steps are measured: the paper's, and where "auto" mostly chooses, finer ones, since a
# step's seconds do not grow on a line there.
_RATIOS = (0.125, 0.25, 0.375, 0.5, 0.75, 1.0)
# Confidence of the drafts of the least and of the most certain of the made-up requests.
_CERTAINTY = (0.5, 0.9)


def powers_of_two(largest: int) -> list[int]:
    """Returns 1, 2, 4, .. up to `largest`: the batch sizes that are measured."""
    return [1 << k for k in range(largest.bit_length())]


def kv_length_for(longest: int) -> int:
    """Returns the K/V length to measure at: about where requests of up to `longest` cells spend their steps."""
    return max(length for length in _KV_LENGTHS if length <= max(1, longest // 2))


@torch.no_grad()
def measure_costs(
    costs: CostTable,
    target: Target,
    cache: SlotCache,
    drafter: BoundDrafter,
    config: DCutConfig,
    batch_sizes: Iterable[int],
    kv_length: int,
    graphs: Graphs | None = None,
    tree: bool = False,
) -> float:
    """Returns the seconds it took to fill the table for these batch sizes; entries that exist are kept.

    Args:
        costs: the table; saved to its file when something was measured.
        target, cache, drafter: with free slots.
        config: of the steps.
        batch_sizes: numbers of requests, at most the cache's slots.
        kv_length: cells in use while measuring.
        graphs: recorded steps, which are then what is measured.
        tree: whether drafts are trees.
    """
    depth, ranks = costs.draft_tokens, target.ranks
    ratios = _RATIOS if graphs is None else PAPER_RATIOS
    mixed = BoundWrapped(drafter, _mixed_blocks)
    engine = Engine(target, cache, mixed, depth, config, None, Stats(), graphs, ranks, tree=tree)
    engine.drafting.strict = True

    def totals(requests: int) -> list[int]:
        return sorted({requests, *(positions(ratio, requests, depth) for ratio in ratios)})

    def step(requests: int, total: int) -> None:
        fake = [_fake_request(slot, kv_length, depth) for slot in range(requests)]
        share = (total / (requests * (depth + 1)),) if total else None
        engine.advance(fake, share)

    missing = ranks.share(lambda: costs.missing(batch_sizes, totals, kv_length))
    if not missing:
        return 0.0
    seconds = costs.measure(missing, kv_length, step, ranks.clock)
    for slot in range(cache.slots):
        cache.free(slot)
        drafter.free(slot)
    if ranks.index == 0:
        costs.save()
    return seconds


def _mixed_blocks(drafts: Drafts, batch: Batch) -> Drafts:
    """Returns the drafts with every place real, so that any T can be packed, and requests from unsure to sure.

    Real rows are ragged, which costs more than as many even ones where attention pads.
    """
    sure = torch.linspace(*_CERTAINTY, len(batch), device=drafts.token.device)
    full = torch.full_like(drafts.count, drafts.token.shape[1])
    return replace(drafts, count=full, confidence=sure[:, None].expand(drafts.token.shape).contiguous())


def _fake_request(slot: int, kv_length: int, depth: int) -> Request:
    """Returns a request that has read `kv_length` cells and has room for every draft."""
    request = Request(id=slot, prompt=[0] * kv_length, max_new_tokens=depth + 3, slot=slot, read=kv_length)
    request.tokens.append(0)
    return request
