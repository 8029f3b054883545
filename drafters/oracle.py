"""An oracle: knows what the target will say and errs by a given profile. For tests and benchmarks.

With it the machinery can be measured apart from any drafter's quality: confidences are calibrated by construction,
since a draft with confidence c is right with probability c. How sure it is differs between requests and steps, as real
drafters' acceptance does (the paper's section 2.1): each block draws a mood from the profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dcut.drafters.base import BoundDrafter, Drafter, token_history
from hf_dcut.noise import Purpose, noise
from hf_dcut.types import Batch, Committed, Drafts


class OracleDrafter(Drafter):
    """Drafts the target's own continuation, with errors.

    Args:
        continuations: {prompt ids: what the target says after it}.
        draft_tokens: D.
        profile: confidences a block can have, one drawn a block, all equally likely; (1.0,) never errs.
        seed: of the errors; requests differ by their text and position.
    """

    def __init__(
        self,
        continuations: Mapping[tuple[int, ...], Sequence[int]],
        draft_tokens: int = 15,
        profile: Sequence[float] = (1.0,),
        seed: int = 0,
    ):
        if not profile or not all(0 <= c <= 1 for c in profile):
            raise ValueError(f"oracle profile={tuple(profile)!r}: give one or more confidences in [0, 1]")
        self.continuations = {prompt: list(said) for prompt, said in continuations.items()}
        self.prompt_sizes = sorted({len(prompt) for prompt in self.continuations}, reverse=True)
        self.draft_tokens, self.profile, self.seed = draft_tokens, tuple(profile), seed

    def check(self, target: PreTrainedModel) -> None:
        """Nothing can fail to fit: a prompt it does not know gets no drafts."""

    def bind(self, target: PreTrainedModel, slots: int, length: int) -> BoundOracle:
        weight = target.get_input_embeddings().weight
        return BoundOracle(self, slots, length, weight.shape[0], weight.device)

    def cell_bytes(self, target: PreTrainedModel) -> int:
        return 2 * torch.int64.itemsize + torch.float64.itemsize + torch.float32.itemsize

    def fingerprint(self) -> dict[str, object]:
        return {"kind": "oracle", "draft_tokens": self.draft_tokens}


class BoundOracle(BoundDrafter):
    """Keeps the text of every slot and, once a prompt is read, what the target will say: int64 [slots, length].

    All draws of a request are made then too, so that a proposal is a few look-ups and takes no time to speak of.
    """

    def __init__(self, oracle: OracleDrafter, slots: int, length: int, vocabulary: int, device: torch.device):
        self.oracle, self.vocabulary = oracle, vocabulary
        self.read = torch.full((slots, length), -1, dtype=torch.int64, device=device)
        self.ahead = torch.full((slots, length + oracle.draft_tokens + 1), -1, dtype=torch.int64, device=device)
        self.known = [False] * slots
        # Of the draft at each position, and the confidence of a block that follows it.
        self.luck = torch.zeros(self.ahead.shape, dtype=torch.float64, device=device)
        self.mood = torch.zeros((slots, length), dtype=torch.float32, device=device)

    def observe(self, committed: Committed) -> None:
        token_history(self.read, committed)

    def propose(self, batch: Batch) -> Drafts:
        """Returns what the target will say, with the profile's errors; no drafts after a prompt it does not know."""
        for row, length in enumerate(batch.length.tolist()):
            # A spare row of the batch is an empty request.
            if length and not self.known[row]:
                self._recognise(row, length)
        depth = self.oracle.draft_tokens
        position = batch.length[:, None] + torch.arange(1, depth + 1, device=batch.length.device)
        truth = self.ahead[: len(batch)].gather(1, position)
        confidence = self.mood[: len(batch)].gather(1, batch.length[:, None]).expand_as(truth)
        wrong = self.luck[: len(batch)].gather(1, position) >= confidence
        token = torch.where(wrong, (truth + 1) % self.vocabulary, truth).clamp_min(0)
        return Drafts.chain(token, confidence, (truth >= 0).cumprod(1).sum(1))

    def _recognise(self, slot: int, length: int) -> None:
        """Looks up which prompt begins the text in a slot's first `length` cells, when it is first proposed for.

        Plain steps may have come before, so the text may hold the beginning of the continuation too.
        """
        self.known[slot] = True
        self.ahead[slot] = -1
        text = tuple(self.read[slot, :length].tolist())
        for size in self.oracle.prompt_sizes:
            continuation = self.oracle.continuations.get(text[:size], ())
            if size <= length and continuation and tuple(continuation[: length - size]) == text[size:]:
                said: Tensor = torch.tensor(continuation, device=self.ahead.device)[: self.ahead.shape[1] - size]
                self.ahead[slot, size : size + len(said)] = said
                self._draw(slot, hash((text[:size], self.oracle.seed)) & 0x7FFFFFFF)
                return

    def _draw(self, slot: int, key: int) -> None:
        """Draws what a request's blocks are like and which drafts are wrong."""
        device = self.luck.device
        seed, position = torch.tensor(key, device=device), torch.arange(self.luck.shape[1], device=device)
        profile = torch.tensor(self.oracle.profile, dtype=torch.float32, device=device)
        mood = noise(seed, position[: self.mood.shape[1]], Purpose.DRAFT, index=1) * len(profile)
        self.luck[slot], self.mood[slot] = noise(seed, position, Purpose.DRAFT), profile[mood.long()]

    def move(self, source: int, destination: int) -> None:
        self.read[destination], self.ahead[destination] = self.read[source], self.ahead[source]
        self.luck[destination], self.mood[destination] = self.luck[source], self.mood[source]
        self.known[destination] = self.known[source]
        self.known[source] = False

    def copy(self, source: int, destination: int, length: int) -> None:
        self.read[destination, :length] = self.read[source, :length]

    def free(self, slot: int) -> None:
        self.known[slot] = False
