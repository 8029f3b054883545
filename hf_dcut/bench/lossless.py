"""Where two methods' tokens differ, how close the call was.

Rounding differs between a packed row and a batch, so a tie of the target's two best tokens may break differently. That
is the only difference allowed: the margin between the two at the first differing token tells it from an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel


@torch.no_grad()
def margin(model: PreTrainedModel, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> float | None:
    """Returns the target's top-2 logit margin at the first token where two answers differ; None if they are equal.

    Args:
        model: the target.
        prompt, ours, theirs: token ids.
    """
    if list(ours) == list(theirs):
        return None
    shared = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    ids = torch.tensor([[*prompt, *theirs[:shared]]], device=model.device)
    best = model(input_ids=ids, logits_to_keep=1).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])
