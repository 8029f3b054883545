"""The likeliest token of each row of logits and its log-probability: what a draft head hands to the selection."""

from __future__ import annotations

from torch import Tensor


def argmax_logprob(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first largest entry int64 [...] and its log-probability float32 [...], at temperature 1.

    The log-probability is NaN where a row holds NaN or +inf, or nothing but -inf.

    Args:
        logits: float [..., V].
    """
    logits = logits.float()
    best, index = logits.max(dim=-1)
    return index, best - logits.logsumexp(dim=-1)
