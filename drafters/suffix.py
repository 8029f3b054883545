"""Suffix decoding: drafts from all that was generated before, whoever asked for it. No model, any target.

Requests repeat each other: answers to one prompt drawn several times, epochs of rollouts, labels of one kind. What a
request says next is looked up where its last tokens occurred in any answer that this drafter has seen, the longest
match first, as in SuffixDecoding (arXiv 2411.04975) and vLLM's method "suffix". The continuations of the latest matches
are a tree; a node is as likely as those that went there before are many: k of m, d tokens behind a match of n, give
k / (m + c / (n + d)^2). How many doubters c there are is learnt from what became of the drafts: few where answers come
again, many where they are new.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_dcut.drafters.base import BoundDrafter, Drafter, token_history
from hf_dcut.drafters.corpus import Corpus
from hf_dcut.drafters.trees import likeliest
from hf_dcut.types import Batch, Committed, Drafts

# c to begin with. Looked up in 11,000 of SmolLM2's answers, what follows the only match is right in 20 % of the cases 2
# tokens on, 47 % 4, 66 % 8 and 83 % 12 and more tokens on (40 other prompts each of GSM8K and MT-Bench).
_DOUBTERS = 24.0
# How much log c moves by each draft that was right or wrong, and how far c goes.
_RATE, _FEWEST, _MOST = 0.02, 1.0, 100.0
# Matches that are looked at.
_MATCHES = 32
# New tokens of a request after which others can draft from them.
_PIECE = 32


class SuffixDrafter(Drafter):
    """Drafts from the answers of all requests, those that still run included. Prompts are not remembered.

    It remembers across calls and threads: keep one as long as its answers are worth something.

    Args:
        draft_tokens: D, most tokens of a path.
        longest_match: most tokens of a match.
        most_tokens: that are remembered, 140 bytes each with the default `longest_match`; the oldest are forgotten.

    Raises:
        ValueError: a number that is not positive.
    """

    branches = True
    remembers = True

    def __init__(self, draft_tokens: int = 10, longest_match: int = 8, most_tokens: int = 1 << 20):
        values = {"draft_tokens": draft_tokens, "longest_match": longest_match, "most_tokens": most_tokens}
        for name, value in values.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"suffix drafter {name}={value!r}: give a positive integer")
        self.draft_tokens, self.longest_match = draft_tokens, longest_match
        self.doubters = _DOUBTERS
        self.corpus = Corpus(longest_match, most_tokens)

    def add(self, texts: Iterable[Sequence[int]]) -> None:
        """Remembers token ids of texts, such as answers of earlier runs; raises ValueError for negative ones."""
        self.corpus.add(texts)

    def learn(self, promised: float, right: int) -> None:
        """Takes in what became of some drafts: a step of gradient ascent on how likely their confidences made it.

        Args:
            promised: the sum of their confidences.
            right: how many were.
        """
        self.doubters = min(_MOST, max(_FEWEST, self.doubters * math.exp(_RATE * (promised - right))))

    def check(self, target: PreTrainedModel) -> None:
        """Raises ValueError when it remembers tokens that the target does not have."""
        vocabulary, largest = target.get_input_embeddings().weight.shape[0], self.corpus.largest
        if largest >= vocabulary:
            raise ValueError(
                f"the suffix drafter remembers token {largest}, and the target has {vocabulary} tokens: its texts are "
                "another tokenizer's, make a SuffixDrafter of its own for this target"
            )

    def bind(self, target: PreTrainedModel, slots: int, length: int) -> BoundSuffix:
        return BoundSuffix(self, slots, length)

    def cell_bytes(self, target: PreTrainedModel) -> int:
        return torch.int64.itemsize

    def fingerprint(self) -> dict[str, object]:
        return {"kind": "suffix", "draft_tokens": self.draft_tokens, "longest_match": self.longest_match}


class BoundSuffix(BoundDrafter):
    """Keeps the tokens of every slot on the CPU, int64 [slots, length], and adds answers to the corpus by pieces.

    Args:
        drafter: whose corpus it reads and adds to.
        slots, length: as of `Drafter.bind`.
    """

    def __init__(self, drafter: SuffixDrafter, slots: int, length: int):
        self.drafter, self.corpus = drafter, drafter.corpus
        self.tokens = torch.full((slots, length), -1)
        # The last chain proposed in each slot, int64 and float32 [slots, D], and the cell of its anchor, -1 for none.
        self.chain = torch.full((slots, drafter.draft_tokens), -1)
        self.confidence, self.anchor = torch.zeros(self.chain.shape), torch.full((slots,), -1)
        # Cells of each slot that hold tokens, and up to which they are in the corpus; None while the prompt is read.
        self.used = [0] * slots
        self.added: list[int | None] = [None] * slots

    def observe(self, committed: Committed) -> None:
        rows = committed.to("cpu")
        token_history(self.tokens, rows)
        slots = rows.slot.tolist()
        for slot, cell in zip(slots, rows.cell.tolist(), strict=True):
            self.used[slot] = max(self.used[slot], cell + 1)
        for slot in set(slots):
            self._remember(slot, _PIECE)

    def propose(self, batch: Batch) -> Drafts:
        """Returns of each request the continuation that promises most tokens."""
        self._continue(batch)
        token, confidence = self.chain[: len(batch)], self.confidence[: len(batch)]
        return Drafts.chain(token.clamp_min(0), confidence.clone(), (token >= 0).sum(1)).to(batch.anchor.device)

    def propose_tree(self, batch: Batch, nodes: int) -> Drafts:
        """Returns the likeliest nodes of all continuations."""
        following, confidence, twin = self._continue(batch)
        _, most, depth = following.shape
        first = (twin == torch.arange(most)[:, None]) & (following >= 0)
        survival = torch.where(first, confidence.cumprod(-1), -1.0)
        # Place by place, so that each node stands behind its parent.
        parent = F.pad(twin[..., :-1] + most * torch.arange(depth - 1), (1, 0), value=-1)
        token, parent, survival = (x.transpose(1, 2).flatten(1) for x in (following.clamp_min(0), parent, survival))
        return likeliest(token, parent, survival, nodes).to(batch.anchor.device)

    def move(self, source: int, destination: int) -> None:
        self.free(destination)
        self.tokens[destination] = self.tokens[source]
        self.used[destination], self.added[destination] = self.used[source], self.added[source]
        self.added[source] = None
        for column in (self.chain, self.confidence, self.anchor):
            column[destination] = column[source]

    def copy(self, source: int, destination: int, length: int) -> None:
        self.tokens[destination, :length] = self.tokens[source, :length]
        self.used[destination] = length

    def free(self, slot: int) -> None:
        self._remember(slot)
        self.tokens[slot] = -1
        self.used[slot], self.added[slot], self.anchor[slot] = 0, None, -1

    def _continue(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Returns how earlier answers went on, how sure each is, and which are the same up to each token.

        That is int64 [B, most, D], -1 behind their ends, and what `_votes` returns. The likeliest become the chains.
        """
        length, rows = batch.length.cpu(), torch.arange(len(batch))
        self.tokens[rows, length] = batch.anchor.cpu()
        self._learn(length)
        for slot, cells in enumerate(length.tolist()):
            if self.added[slot] is None:
                self.added[slot] = cells
        following, matching = self._following(length)
        confidence, twin = _votes(following, matching, self.drafter.doubters)
        best = confidence.cumprod(-1).sum(-1).argmax(1)
        self.chain[rows], self.confidence[rows] = following[rows, best], confidence[rows, best]
        self.anchor[rows] = length
        return following, confidence, twin

    def _learn(self, length: Tensor) -> None:
        """Compares the last chains with what came since.

        Args:
            length: int64 [B], the cells of the anchors.
        """
        rows = len(length)
        chain, begin = self.chain[:rows], self.anchor[:rows]
        at = begin[:, None] + 1 + torch.arange(chain.shape[1])
        known = (begin[:, None] >= 0) & (at <= length[:, None]) & (chain >= 0)
        right = known & (self.tokens[:rows].gather(1, at.clamp(0, self.tokens.shape[1] - 1)) == chain)
        # A draft behind a wrong one tells nothing.
        judged = known & F.pad(right.cummin(1).values[:, :-1], (1, 0), value=True)
        self.drafter.learn(float(self.confidence[:rows][judged].sum()), int(right[judged].sum()))

    def _following(self, length: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what followed the longest matches, int64 [B, most, D], -1 behind; and their length n, int64 [B]."""
        rows = torch.arange(len(length))
        at = length[:, None] - torch.arange(self.drafter.longest_match)
        suffix = torch.where(at >= 0, self.tokens[rows[:, None], at.clamp_min(0)], -1)
        following = torch.full((len(rows), _MATCHES, self.drafter.draft_tokens), -1)
        matching, most = torch.zeros_like(length), torch.zeros_like(length)
        for index in self.corpus.indexes:
            ends, matched = index.find(suffix, _MATCHES)
            # The longest match counts, of several the one that occurs more often, then the latest.
            worth = matched * (_MATCHES + 1) + (ends >= 0).sum(1)
            better = (worth >= most) & (matched > 0)
            following = torch.where(better[:, None, None], index.following(ends, following.shape[2]), following)
            matching, most = torch.where(better, matched, matching), torch.where(better, worth, most)
        return following, matching

    def _remember(self, slot: int, least: int = 1) -> None:
        """Adds what a request has generated since the last time, if that is so much."""
        start, end = self.added[slot], self.used[slot]
        if start is None or end - start < least:
            return
        begin = max(0, start - self.drafter.longest_match)
        text = self.tokens[slot, begin:end].tolist()
        # Requests that are made up to measure steps have never read their prompt.
        if min(text) >= 0:
            self.corpus.add([text], start - begin)
        self.added[slot] = end


def _votes(following: Tensor, matching: Tensor, doubters: float) -> tuple[Tensor, Tensor]:
    """Returns how sure each continuation's tokens are, and the first continuation that is the same up to each.

    Both are [B, most, D], float32 and int64.

    Args:
        following: int64 [B, most, D], -1 behind their ends.
        matching: int64 [B], tokens of the match before them.
        doubters: c.
    """
    there = following >= 0
    # [B, most, most, D]: whether two continuations are the same up to a token.
    same = (following[:, :, None] == following[:, None]) & there[:, :, None]
    alike = same.cumprod(-1, dtype=torch.uint8).bool()
    # Of those that went the same way so far, the ones that go on.
    voters = (F.pad(alike[..., :-1], (1, 0), value=True) & there[:, None]).sum(2)
    doubt = doubters / (matching[:, None] + torch.arange(following.shape[2])).clamp_min(1) ** 2
    confidence = torch.where(there, alike.sum(2) / (voters + doubt[:, None]), 0.0)
    return confidence, alike.int().argmax(2)
