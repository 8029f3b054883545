"""Logits + Packed -> Verdict: how far the target agrees with each request's drafts.

A draft is accepted when it is the token the target chose after the row before it, and so are all before it. The last
such row gives the request's next token, so every step commits at least one token and exactly those the target would
have chosen one by one. In a tree that is one path: the target chooses one token after each row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_dcut.types import Packed, Verdict


def accept(token: Tensor, packed: Packed) -> Verdict:
    """Returns the target's verdict on each of the R requests of the row.

    A request that reads its prompt has nothing to accept; its next token is -1 until the prompt is read.

    Args:
        token: int64 [L], what the target chose after each of `packed.logit_rows`.
        packed: the row they belong to.
    """
    choice = packed.token.new_full((len(packed),), -1)
    choice[packed.logit_rows] = token
    start, end = packed.start[:-1].long(), packed.start[1:].long()
    offset = torch.arange(packed.width, device=start.device)
    row = start[: packed.decoding, None] + offset
    inside = row < end[: packed.decoding, None]
    row = torch.where(inside, row, start[: packed.decoding, None])
    accepted, last = torch.zeros_like(start), end - 1
    if packed.ancestors is None:
        # A draft's verdict was given by the row before it; the anchor, at offset 0, is certain.
        agreed = (choice[(row - 1).clamp_min(0)] == packed.token[row]) & inside | (offset == 0)
        path = torch.where(agreed.cumprod(dim=1).bool(), row, -1)
    else:
        path = _path(choice, packed, row, inside)
    accepted[: packed.decoding] = (path >= 0).sum(dim=1) - 1
    last[: packed.decoding] = path.amax(dim=1)
    return Verdict(accepted, choice[last], path)


def _path(choice: Tensor, packed: Packed, row: Tensor, inside: Tensor) -> Tensor:
    """Returns the packed rows of the longest path that the target agrees with, int64 [decoding, width]; -1 behind it.

    Of two nodes with the same token behind the same node, which a drafter should not propose, the first counts.

    Args:
        choice: int64 [T], what the target chose after each row.
        packed: a row of trees.
        row, inside: int64 and bool [decoding, width], packed row of each node, and whether there is one.
    """
    assert packed.ancestors is not None
    offset = torch.arange(packed.width, device=row.device)
    # [decoding, width, width]: whether a node has another before it, or is it.
    ancestors = packed.ancestors[row][..., : packed.width] & inside[..., None]
    before = torch.where(ancestors & (offset < offset[:, None]), offset, 0).amax(dim=-1)
    agreed = (choice[row.gather(1, before)] == packed.token[row]) | (offset == 0)
    reached = inside & ~(ancestors & ~agreed[:, None]).any(dim=-1)
    deepest = torch.where(reached, ancestors.sum(dim=-1), 0).argmax(dim=1)
    on_path = ancestors[torch.arange(len(row), device=row.device), deepest]
    # Nodes stand behind their parents, so the path is in order; only its rows are to stand side by side.
    order = (~on_path).int().argsort(dim=1, stable=True)
    return torch.where(on_path, row, -1).gather(1, order)
