"""Memory of the slots: what they take, what there is, how many fit."""

from __future__ import annotations

import logging

import psutil
import torch

from hf_dcut.cache import cache_bytes
from hf_dcut.config import DCutConfig
from hf_dcut.drafters.base import Drafter
from hf_dcut.target import Target

logger = logging.getLogger(__name__)

# Without a limit, slots that may be fewer leave this share of the free memory to everything else.
_LEFT = 0.2


def check_memory(target: Target, drafter: Drafter | None, slots: int, length: int, limit: int | None) -> None:
    """Raises MemoryError, with the numbers, when the two slot caches do not fit; tells their size otherwise."""
    own = cache_bytes(target.shapes, slots, length, target.dtype)
    drafts = drafter.cell_bytes(target.model) * slots * length if drafter else 0
    free = _free_bytes(target) if limit is None else limit
    told = f"{slots} slots of {length} cells take {size(own)} for the target and {size(drafts)} for the drafter"
    if own + drafts > free:
        source = "free on " + str(target.device) if limit is None else "allowed by dcut max_cache_bytes"
        raise MemoryError(
            f"{told}, but {size(free)} are {source}: generate for fewer requests at once or lower max_new_tokens"
        )
    logger.info("%s", told)


def cells_ahead(drafter: Drafter | None, config: DCutConfig) -> int:
    """Returns how many cells of a slot lie behind the longest request: what a step's drafts may need."""
    if drafter is None:
        return 0
    depth = drafter.draft_tokens
    return max(depth, config.nodes(depth)) if drafter.branches and config.draft_tree is not False else depth


def fitting_slots(target: Target, drafter: Drafter | None, slots: int, length: int, limit: int | None) -> int:
    """Returns how many of the slots fit into memory, at least one; says so where they are fewer.

    Args:
        target, drafter: whose K/V a slot holds.
        slots: how many are wanted.
        length: cells of a slot.
        limit: bytes they may take; None for most of what the device has free.
    """
    fit = max(1, _allowed_bytes(target, limit) // slot_bytes(target, drafter, length))
    if fit < slots:
        logger.warning("memory holds %d of %d slots of %d cells: the other requests wait", fit, slots, length)
    return min(fit, slots)


def fitting_length(target: Target, drafter: Drafter | None, limit: int | None) -> int:
    """Returns the cells of the longest slot that fits into memory alone."""
    states = slot_bytes(target, drafter, 0)
    return (_allowed_bytes(target, limit) - states) // (slot_bytes(target, drafter, 1) - states)


def slot_bytes(target: Target, drafter: Drafter | None, length: int) -> int:
    """Returns the bytes that one slot of so many cells takes, the target's and the drafter's."""
    own = cache_bytes(target.shapes, 1, length, target.dtype)
    return own + (drafter.cell_bytes(target.model) * length if drafter else 0)


def _allowed_bytes(target: Target, limit: int | None) -> int:
    return int(_free_bytes(target) * (1 - _LEFT)) if limit is None else limit


def _free_bytes(target: Target) -> int:
    """Returns the bytes that can still be taken where the target is: on each device, if it lies on several."""
    device = target.device
    if device.type != "cuda":
        return target.ranks.least(psutil.virtual_memory().available // target.ranks.size)
    free, _ = torch.cuda.mem_get_info(device)
    return target.ranks.least(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def size(count: int) -> str:
    """Returns a number of bytes in a unit of which there is at least one."""
    if count < 1024:
        return f"{count} bytes"
    unit = min((count.bit_length() - 1) // 10, 4)
    return f"{count / 1024**unit:,.1f} {('KiB', 'MiB', 'GiB', 'TiB')[unit - 1]}"
