"""Logits + Packed -> Verdict: how far the target agrees with each request's drafts.

A draft is accepted when it is the token the target chose after the row before it. The first row whose draft is not
gives the request's next token, so every step commits at least one token and exactly those the target would have
chosen one by one.
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
    # A draft's verdict was given by the row before it; the anchor, at offset 0, is certain.
    agreed = (choice[(row - 1).clamp_min(0)] == packed.token[row]) & inside | (offset == 0)
    reached = agreed.cumprod(dim=1).bool()
    accepted = torch.zeros_like(start)
    accepted[: packed.decoding] = reached.sum(dim=1) - 1
    last = torch.where(torch.arange(len(start), device=start.device) < packed.decoding, start + accepted, end - 1)
    return Verdict(accepted, choice[last], torch.where(reached, row, -1))
