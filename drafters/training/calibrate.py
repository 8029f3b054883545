"""How sure a drafter should be: one factor for its logits, fitted on answers it was not trained on.

Training answers are known too well, so confidences come out too high on others. D-cut compares survivals, products of
confidences, with the cost of verifying, so it is these that should hold: the factor is the one under which they tell
best which drafts were accepted (log loss). It changes no draft. Temperature scaling: arXiv 1706.04599.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# An eighth of an octave apart, from half to twice.
MULTIPLIERS = tuple(2.0 ** (i / 8) for i in range(-8, 9))


def best_multiplier(blocks: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Returns the factor of the logits, out of `MULTIPLIERS`, whose survivals have the smallest log loss; else 1.

    Args:
        blocks: logits [n, D, draft vocabulary] and labels int64 [n, D], -1 where there is none, of drafted blocks.
    """
    losses, places = torch.zeros(len(MULTIPLIERS), dtype=torch.float64), 0
    for logits, label in blocks:
        known = label >= 0
        accepted = (logits.argmax(-1) == label).int().cumprod(-1).bool()
        places += int(known.sum())
        below = logits.to(torch.promote_types(logits.dtype, torch.float32))
        below = below - below.amax(-1, keepdim=True)
        for index, multiplier in enumerate(MULTIPLIERS):
            survival = (-(below * multiplier).logsumexp(-1)).cumsum(-1).exp()
            told = torch.where(accepted, survival, 1 - survival).clamp_min(1e-6)
            losses[index] -= told.log()[known].double().sum().cpu()
    return MULTIPLIERS[int(losses.argmin())] if places else 1.0
