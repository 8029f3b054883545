"""Prompt lookup: drafts copied from where the request's last tokens occurred before. No model, any target.

The longest suffix n-gram that occurs earlier is looked up; the continuation after its last occurrence is the draft.
The confidence of a draft is how many of the occurrences that agreed so far agree with it too, smoothed by doubters, of
which there are the fewer the longer the tokens before it match: k of m behind n tokens give k / (m + 1.7 / n). So one
occurrence of one token makes little sure, and many that agree, or one that has agreed for long, much.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dcut.drafters.base import BoundDrafter, Drafter, token_history
from hf_dcut.types import Batch, Committed, Drafts

# Of one token that matches. In SmolLM2's answers what follows the only occurrence is right in 37 % of the cases behind
# one token, 59 % behind two, 66 % behind four, 79 % behind eight and 88 % behind twelve.
_DOUBTERS = 1.7
# Tokens that are matched unless it is said otherwise: enough to tell a good match from chance.
LONGEST_MATCH = 4


class PromptLookupDrafter(Drafter):
    """Drafts from the request's own text.

    Args:
        draft_tokens: D, most tokens to copy.
        max_matching_ngram_size: longest suffix that is looked for, as in `generate`.
    """

    def __init__(self, draft_tokens: int = 10, max_matching_ngram_size: int = LONGEST_MATCH):
        for name, value in (("draft_tokens", draft_tokens), ("max_matching_ngram_size", max_matching_ngram_size)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"prompt lookup {name}={value!r}: give a positive integer")
        self.draft_tokens, self.ngram = draft_tokens, max_matching_ngram_size

    def check(self, target: PreTrainedModel) -> None:
        """Nothing can fail to fit: the drafts are the request's own tokens."""

    def bind(self, target: PreTrainedModel, slots: int, length: int) -> BoundPromptLookup:
        device = target.get_input_embeddings().weight.device
        return BoundPromptLookup(self.draft_tokens, self.ngram, slots, length, device)

    def cell_bytes(self, target: PreTrainedModel) -> int:
        return torch.int64.itemsize

    def fingerprint(self) -> dict[str, object]:
        return {"kind": "prompt lookup", "draft_tokens": self.draft_tokens, "ngram": self.ngram}


class BoundPromptLookup(BoundDrafter):
    """Keeps the tokens of every slot, int64 [slots, length]."""

    capturable = True

    def __init__(self, draft_tokens: int, ngram: int, slots: int, length: int, device: torch.device):
        self.draft_tokens, self.ngram = draft_tokens, ngram
        self.tokens = torch.full((slots, length), -1, dtype=torch.int64, device=device)

    def observe(self, committed: Committed) -> None:
        token_history(self.tokens, committed)

    def propose(self, batch: Batch) -> Drafts:
        """Returns what followed the last occurrence of each request's suffix; no drafts where there is none."""
        text = self.tokens[: len(batch)]
        text[torch.arange(len(batch), device=text.device), batch.length] = batch.anchor
        end = batch.length + 1
        occurs, matching = self._occurrences(text, end)
        token, confidence, count = self._continue(text, end, occurs, matching)
        return Drafts.chain(token, confidence, count)

    def _occurrences(self, text: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        """Returns where the longest suffix that occurs earlier ends, and how many tokens it has.

        The former is bool [B, length], true at j if text[j-n+1 .. j] is the suffix; the latter n, int64 [B].
        An occurrence must have a token behind it that is known, so the suffix itself does not count.
        """
        rows, length = text.shape
        place = torch.arange(length, device=text.device)
        best = torch.zeros(rows, length, dtype=torch.bool, device=text.device)
        matching = torch.ones(rows, dtype=torch.int64, device=text.device)
        same = place < end[:, None] - 1
        for n in range(1, self.ngram + 1):
            # Column j compares text[j-n+1] with the n-th token from the end.
            wanted = text.gather(1, (end - n).clamp_min(0)[:, None])
            here = torch.nn.functional.pad(text[:, : length - n + 1], (n - 1, 0), value=-1)
            same = same & (here == wanted) & (end >= n)[:, None]
            found = same.any(1)
            best = torch.where(found[:, None], same, best)
            matching = torch.where(found, n, matching)
        return best, matching

    def _continue(self, text: Tensor, end: Tensor, occurs: Tensor, matching: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the tokens after the last occurrence, int64 [B, D], their confidences and how many there are."""
        length = text.shape[1]
        place = torch.arange(length, device=text.device)
        last = torch.where(occurs, place, -1).amax(1)
        # What is not known yet is -1, also behind the last cell.
        known = torch.nn.functional.pad(text.masked_fill(place >= end[:, None], -1), (0, self.draft_tokens), value=-1)
        ahead = torch.arange(1, self.draft_tokens + 1, device=text.device)
        token = known.gather(1, last.clamp_min(0)[:, None] + ahead)
        # [B, D, length]: what follows each place, k tokens on, and whether it is known.
        following, there = (x.unfold(1, length, 1)[:, 1:] for x in (known, known >= 0))
        same = (following == token[:, :, None]) & there
        agree = torch.cat([occurs[:, None], same], 1).cumprod(1, dtype=torch.uint8)
        # A place votes on a draft if those before it match too.
        voters = (agree[:, :-1] * there).sum(2, dtype=torch.int32)
        doubt = _DOUBTERS / (matching[:, None] + ahead - 1)
        confidence = agree[:, 1:].sum(2, dtype=torch.int32) / (voters + doubt)
        count = torch.where(last >= 0, (end - 1 - last).clamp(0, self.draft_tokens), 0)
        # Places without a draft must still hold tokens.
        return token.clamp_min(0), confidence.float(), count

    def move(self, source: int, destination: int) -> None:
        self.tokens[destination] = self.tokens[source]

    def copy(self, source: int, destination: int, length: int) -> None:
        self.tokens[destination, :length] = self.tokens[source, :length]

    def free(self, slot: int) -> None:
        self.tokens[slot] = -1
