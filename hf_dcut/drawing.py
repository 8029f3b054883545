"""Draft logits -> sampled Drafts: the drafter's distribution q, warped like the target's, and a draw from it.

The cut may not see what was drawn: kept drafts must still follow q, or rejection sampling is biased (the paper's
appendix B shows 0.55 where 0.5 is due). The score of a place is therefore one of q alone, its largest probability. A
block drafter fills all places from the context in one pass, so q[i, k] is a function of the committed tokens only, and
so are all scores, the budget, and which places are kept. Given the committed tokens the drawn tokens are independent of
that decision, hence still distributed as q after it: nothing leaks. Drafters whose q at one place depends on what was
drawn before it are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hf_dcut.choosing import draw, warp
from hf_dcut.noise import Purpose
from hf_dcut.requests import Request
from hf_dcut.types import Batch, Drafts, Proposal


def draw_drafts(
    logits: Tensor, ids: Tensor | None, batch: Batch, requests: Sequence[Request], vocabulary: int
) -> Drafts:
    """Returns drafts drawn from q, with q as their proposal and its largest probability as their confidence.

    Where logits give no distribution the confidence is NaN, by which the step's drafts are dropped.

    Args:
        logits: [B, D, C], of the drafter.
        ids: int64 [C], tokens they are of; None when C = V.
        batch: the requests.
        requests: the same, with their processors, which look at scores alone.
        vocabulary: V.
    """
    rows, depth = logits.shape[:2]
    scores = logits.float()
    if ids is not None:
        scores = scores.new_full((rows, depth, vocabulary), -torch.inf).index_copy(2, ids, scores)
    scores = torch.stack([warp(request, row) for request, row in zip(requests, scores, strict=True)])
    position = batch.length[:, None] + torch.arange(1, depth + 1, device=logits.device)
    seed = batch.seed[:, None].expand(rows, depth)
    broken = scores.softmax(dim=-1).isnan().any(dim=-1, keepdim=True)
    scores = scores.masked_fill(broken, 0.0)
    token = draw(scores.flatten(0, 1), seed.flatten(), position.flatten(), Purpose.DRAFT).view(rows, depth)
    probability = scores.softmax(dim=-1)
    drafts = Drafts.chain(token, probability.amax(dim=-1).masked_fill(broken[..., 0], torch.nan))
    return replace(drafts, proposal=Proposal(probability))
