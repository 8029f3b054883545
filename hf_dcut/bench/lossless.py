"""Where two methods' tokens differ, how close the call was.

Rounding differs between a packed row and a batch, so a tie of the target's two best tokens may break differently. That
is the only difference allowed: the margin between the two at the first differing token tells it from an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from transformers import PreTrainedModel

# Margins below these are ties to within rounding; others are errors.
TIE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}


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


@dataclass(frozen=True)
class Agreement:
    """How two methods' answers to the same prompts compare.

    Attributes:
        equal: answers that are the same, token for token.
        ties: that differ first where the target's two best tokens tie to within rounding.
        mismatches: that differ otherwise.
        margin: the largest margin at a first difference, in logits; 0 without one.
    """

    equal: int
    ties: int
    mismatches: int
    margin: float

    def to_dict(self) -> dict[str, float]:
        """Returns the numbers, JSON-able."""
        return asdict(self)


def agreement(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
) -> Agreement:
    """Returns how two methods' answers compare.

    Args:
        model: the target.
        prompts, ours, theirs: token ids of each.
    """
    margins = [margin(model, *answer) for answer in zip(prompts, ours, theirs, strict=True)]
    found = [m for m in margins if m is not None]
    ties = sum(m < TIE[model.dtype] for m in found)
    return Agreement(len(margins) - len(found), ties, len(found) - ties, max(found, default=0.0))
