"""Whether weights are those of the model their config describes: every fault found, and named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_dcut.drafters.dflash.config import DFlashConfig
from hf_dcut.drafters.dflash.dialects import Dialect

# Tables that a drafter may bring along instead of borrowing them from its target: part, and its weight's name.
OWN = {"embed_tokens": "embed_tokens.weight", "lm_head": "lm_head.weight", "mask_embedding": "mask_embedding"}


def own_parts(names: Mapping[str, object]) -> tuple[str, ...]:
    """Returns which tables are among the weights of a drafter."""
    return tuple(part for part, name in OWN.items() if name in names)


def take_maps(found: dict[str, Tensor], config: DFlashConfig) -> Tensor | None:
    """Takes out what no model holds: t2d, which is returned, and maps of a whole vocabulary onto itself.

    Some formats write the latter though they draft from all tokens.
    """
    t2d, d2t = found.pop("t2d", None), found.get("d2t")
    if config.draft_vocab_size is not None:
        return t2d
    if d2t is not None and not d2t.any():
        del found["d2t"]
    return None if t2d is not None and bool(t2d.all()) else t2d


def shape_faults(wanted: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]]) -> list[str]:
    """Returns what is missing, unexpected or of another shape, one line each kind; empty when all fits.

    Args:
        wanted: {name of a weight: shape} of the model.
        found: the same of what was read.
    """
    shapes = [
        f"{name} is {tuple(found[name])}, config.json asks for {tuple(shape)}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    faults = {
        "missing": sorted(wanted.keys() - found.keys()),
        "unexpected": sorted(found.keys() - wanted.keys()),
        "of another shape": shapes,
    }
    return [f"{what}: {_first(names)}" for what, names in faults.items() if names]


def needed_faults(dialect: Dialect, found: Mapping[str, object]) -> list[str]:
    """Returns what this format cannot do without and what to do about it."""
    return [
        f"{name} is missing. {dialect.name} drafters keep it in {source}, a pickle, which is not opened: convert it as "
        "docs/drafters.md says"
        for name, source in dialect.needs.items()
        if name not in found
    ]


def draft_vocabulary_faults(config: DFlashConfig, d2t: Tensor | None, t2d: Tensor | None) -> list[str]:
    """Returns what is wrong with the maps between draft tokens and tokens.

    Args:
        config: has `vocab_size` and `draft_vocab_size`.
        d2t: [draft vocabulary], what to add to a draft token to get its token.
        t2d: [vocabulary], which tokens can be drafted.
    """
    if d2t is None:
        alone = t2d is not None and config.draft_vocab_size is None
        return ["t2d but no draft vocabulary: draft_vocab_size and d2t are needed with it"] if alone else []
    if d2t.is_floating_point():
        return [f"d2t is {d2t.dtype}: offsets are integers"]
    if config.vocab_size is None:
        return ["d2t without vocab_size in config.json: the size of the target's vocabulary is needed"]
    ids = d2t.long() + torch.arange(len(d2t))
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= config.vocab_size:
        return [
            f"d2t maps drafts to tokens {low} to {high}, vocab_size={config.vocab_size}: d2t holds offsets "
            "(token = draft + d2t[draft]) into the target's vocabulary"
        ]
    mask = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    if t2d is not None and not torch.equal(mask, t2d.bool()):
        return ["t2d and d2t name different tokens: they come from different drafters"]
    return []


def _first(names: list[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
