"""The loss: cross-entropy with what the target says, earlier places of a block weighted more.

What it says are its greedy tokens, its probabilities for them and all others, or a mixture of both. Probabilities tell
more of a text than the one token that was taken, so few answers go further, and the drafter is less sure of itself.

Place k is only ever looked at when all places before it were right, so its weight falls as exp(-(k - 1) / decay)
(arXiv 2602.06036). Logits are by far the largest tensors of a step. The head is frozen, so each run of rows gets its
gradient at once and its logits are dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_dcut.drafters.training.teacher import Head, Teacher

# Logits that exist at a time.
_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 28}


def place_weights(depth: int, decay: float, device: torch.device | str | None = None) -> Tensor:
    """Returns the weight of each place of a block, float32 [D]."""
    return torch.exp(-torch.arange(depth, dtype=torch.float32, device=device) / decay)


def block_loss(
    hidden: Tensor, head: Head, label: Tensor, weight: Tensor, teacher: Teacher | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the weighted sum of cross-entropies, a scalar, and which labels are the likeliest tokens, bool like them.

    Args:
        hidden: [..., hidden], what the head reads.
        head: frozen; gives logits [..., draft vocabulary].
        label: int64 [...], -1 where there is none.
        weight: float32 [...].
        teacher: the target's probabilities, for a share of the loss.
    """
    if teacher is not None:
        teacher = teacher._replace(states=teacher.states.flatten(0, -2))
    loss, right = _HeadLoss.apply(hidden.flatten(0, -2), head, label.flatten(), weight.flatten(), teacher)
    return loss, right.view_as(label)


class _HeadLoss(torch.autograd.Function):
    """Cross-entropy behind a frozen head, whose gradient is ready when the loss is."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Head, label: Tensor, weight: Tensor, teacher: Teacher | None
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            vocabulary = head(hidden[:1]).shape[-1]
        rows = max(1, _ELEMENTS.get(hidden.device.type, 1 << 26) // vocabulary)
        losses: list[Tensor] = []
        right: list[Tensor] = []
        gradients: list[Tensor] = []
        for first in range(0, len(label), rows):
            part, labels, weights = (x[first : first + rows] for x in (hidden, label, weight))
            wanted = labels if teacher is None else teacher.wanted(labels, first)
            with torch.enable_grad():
                leaf = part.detach().requires_grad_()
                logits = head(leaf)
                wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
                loss = (F.cross_entropy(wide, wanted, ignore_index=-1, reduction="none") * weights).sum()
            gradients += torch.autograd.grad(loss, leaf) if hidden.requires_grad else ()
            losses.append(loss.detach())
            right.append(wide.detach().argmax(-1) == labels)
        ctx.save_for_backward(*gradients)
        found = torch.cat(right)
        ctx.mark_non_differentiable(found)
        return torch.stack(losses).sum(), found

    @staticmethod
    def backward(ctx: Any, loss: Tensor, right: Tensor) -> tuple[Tensor, None, None, None, None]:
        return torch.cat(ctx.saved_tensors) * loss, None, None, None, None
