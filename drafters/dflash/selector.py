"""DFlash2's selector: drafts that fit each other, chosen among the likeliest candidates of each place.

    score(candidate) = logit(candidate) + <predecessor[previous token] * W hidden, successor[candidate]>

The block is walked from the anchor; the candidate with the best score is the draft, and the next one's previous token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_dcut.drafters.dflash.config import DFlashConfig


class CandidateSelector(nn.Module):
    """What speaks for one token behind another, as a product of two codebooks.

    Args:
        config: has `selector_rank`, `selector_top_k` and `vocab_size`.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__()
        assert config.selector_rank is not None
        assert config.selector_top_k is not None
        assert config.vocab_size is not None
        self.top_k = min(config.selector_top_k, config.vocab_size)
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))

    def walk(self, hidden: Tensor, logits: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the drafts int64 [B, D] and the probability of each among its candidates, float32 [B, D].

        Args:
            hidden: [B, D, hidden], by which the logits were made.
            logits: float32 [B, D, V].
            anchor: int64 [B], the token before the first draft.
        """
        unary, candidates = logits.topk(self.top_k, dim=-1)
        context, successors = self.hidden_projection(hidden), self.successor_codebook[candidates]
        previous, tokens, confidences = anchor, [], []
        for place in range(candidates.shape[1]):
            query = self.predecessor_codebook[previous] * context[:, place]
            score = unary[:, place] + (successors[:, place] @ query[..., None])[..., 0].float()
            confidence, best = score.softmax(dim=-1).max(dim=-1)
            previous = candidates[:, place].gather(1, best[:, None])[:, 0]
            tokens.append(previous)
            confidences.append(confidence)
        return torch.stack(tokens, dim=1), torch.stack(confidences, dim=1)
