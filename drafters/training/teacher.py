"""`Teacher`: the target's probabilities, which a drafter may learn beside its greedy tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

Head = Callable[[Tensor], Tensor]


class Teacher(NamedTuple):
    """What the target thought of each label's place.

    Attributes:
        states: [..., hidden] beside the labels, what the target's head reads.
        head: gives the target's logits [..., draft vocabulary].
        share: of the loss, in (0, 1]; the greedy tokens have the rest.
    """

    states: Tensor
    head: Head
    share: float

    @torch.no_grad()
    def wanted(self, label: Tensor, first: int) -> Tensor:
        """Returns the probabilities to learn, float32 [n, draft vocabulary], of n labels from row `first` on.

        Where a label is -1 they mean nothing.
        """
        logits = self.head(self.states[first : first + len(label)])
        wanted = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1) * self.share
        greedy = torch.full_like(wanted[:, :1], 1 - self.share)
        return wanted.scatter_add_(1, label.clamp_min(0)[:, None], greedy)


@torch.no_grad()
def check_head(target: PreTrainedModel) -> None:
    """Raises ValueError for a target whose logits are not simply its head's: those that scale or cap them."""
    ids = torch.arange(8, device=target.get_input_embeddings().weight.device)[None]
    plain = target.get_output_embeddings()(target.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state)
    if not torch.allclose(target(input_ids=ids).logits, plain.to(target.device), rtol=1e-2, atol=1e-2):
        raise ValueError(
            f"soft: {type(target).__name__} does more to its logits than its head does, so its probabilities cannot be "
            "told from its states. Train with soft=0"
        )
