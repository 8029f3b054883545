"""Drafts -> Scores: how likely each drafted position is to be committed (the paper's equation 3).

    s[i, k] = c[i, 1] * ... * c[i, k]

A confidence in [0, 1] makes s non-increasing along a request, also in floating point, so the best positions of a batch
always form a prefix of every request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_dcut.kernels import survivals
from hf_dcut.types import Batch, Drafts, Scores


def score(drafts: Drafts, batch: Batch) -> Scores:
    """Returns the survival of every drafted position; NaN from the first non-finite confidence of a request on.

    Args:
        drafts: chains of up to N drafts.
        batch: the requests they were made for; drafts beyond a request's room are not valid.
    """
    valid = usable(drafts, batch)
    return Scores(survivals(drafts.confidence, valid), valid)


def usable(drafts: Drafts, batch: Batch) -> Tensor:
    """Returns which drafts are real and within their request's room, bool [B, N]."""
    node = torch.arange(drafts.token.shape[1], device=drafts.token.device)
    return node < torch.minimum(drafts.count, batch.room)[:, None]
