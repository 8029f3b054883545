"""What is different where drafts are trees: which tokens a node sees, and where it stands in its request's text.

    node      0  1  2  3            anchor a, drafts b -> c, b -> d, e
    token     b  e  c  d            packed    a b e c d
    parent   -1 -1  0  0            cells     5 6 7 8 9      where their K/V go
                                    positions 5 6 6 7 7      what RoPE sees

A packed row of trees differs from one of chains in two columns, positions and ancestors. Attention masks by the latter,
`accept` follows the one path that the target agrees with, and `SlotCache.commit` moves its K/V together.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hf_dcut.types import Drafts, Packed


def parents(drafts: Drafts) -> Tensor:
    """Returns the node that each node follows, int64 [B, N]; -1 is the anchor."""
    if drafts.parent is not None:
        return drafts.parent
    rows, depth = drafts.token.shape
    return torch.arange(-1, depth - 1, device=drafts.token.device).expand(rows, depth)


def ancestors_of(parent: Tensor) -> Tensor:
    """Returns bool [B, N, N], at [b, k, j] whether node j is k itself or before it.

    Args:
        parent: int64 [B, N]. One that is not before its node counts as the anchor, so that first nodes are whole trees.
    """
    nodes = parent.shape[1]
    place = torch.arange(nodes, device=parent.device)
    follows = (parent[:, :, None] == place) & (place < place[:, None])
    reach = (follows | (place == place[:, None])).float()
    # Squares reach twice as far: 1, 2, 4, .. steps.
    for _ in range(max(0, nodes - 2).bit_length()):
        reach = (reach @ reach).clamp_max(1.0)
    return reach.bool()


def branch(packed: Packed, parent: Tensor) -> Packed:
    """Returns the row of decoding requests whose drafts are trees.

    Args:
        packed: the row as if they were chains.
        parent: int64 [B, N], as in `Drafts`.
    """
    # Everybody sees the anchor.
    seen = torch.nn.functional.pad(ancestors_of(parent), (1, 0, 1, 0))
    seen[:, :, 0] = True
    row = replace(packed, ancestors=seen[packed.slot, packed.node + 1])
    return replace(row, position=row.position + row.text_cells() - row.cell)
