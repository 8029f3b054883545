"""Replays: what a drafter would have proposed at every step of answers that the target has already given.

Greedy decoding with every draft verified commits the answer whatever the drafter is, so its steps can be told from the
answer alone: the accepted drafts are those that agree with it. That needs one forward of the target a text instead of
one a step, and any number of drafters can be compared on the very same text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_dcut.drafters.base import BoundDrafter, Drafter
from hf_dcut.drafters.training.answers import Answer
from hf_dcut.taps import tap_reader
from hf_dcut.types import Batch, Committed


@dataclass(frozen=True)
class Replay:
    """The drafted positions of all steps, R of them.

    Attributes:
        confidence: float32 [R, D], of each draft, given that those before it hold.
        right: bool [R, D], drafts that are the answer's own tokens; False where there was no draft.
        offered: bool [R, D], places that held a draft and have a token of the answer to compare with.
        open: bool [R, D], places that have such a token, with or without a draft.
        added: int64 [R], tokens the step committed: the accepted drafts and the target's own, which an answer that
            ends with a draft lacks.
    """

    confidence: Tensor
    right: Tensor
    offered: Tensor
    open: Tensor
    added: Tensor

    @property
    def accepted(self) -> Tensor:
        """Drafts that full verification accepts: right, and so are all before them. Bool [R, D]."""
        return self.right.int().cumprod(1).bool()

    @property
    def survival(self) -> Tensor:
        """What drafts are ranked by, float32 [R, D]: the product of the confidences up to each (paper, equation 3)."""
        return self.confidence.cumprod(1)

    @property
    def tokens_per_step(self) -> float:
        """Tokens committed a step, the target's own included (the paper's MAT)."""
        return float(self.added.double().mean())

    @property
    def place_acceptance(self) -> list[float]:
        """Share of steps that accepted the draft at each place, and all before it."""
        return (self.accepted.sum(0) / self.open.sum(0).clamp_min(1)).tolist()


@torch.no_grad()
def replay(drafter: Drafter, model: PreTrainedModel, answers: Sequence[Answer], slots: int = 32) -> Replay:
    """Returns the steps that `drafter` takes through greedy answers of `model`.

    Args:
        drafter: whose drafts are looked at.
        model: the target, whose taps the drafter reads.
        answers: of the target; those with less than two tokens have no steps.
        slots: answers at once.

    Raises:
        ValueError: the drafter does not fit the target.
    """
    drafter.check(model)
    rows: list[tuple[Tensor, ...]] = []
    # Neighbours of about the same length leave few slots empty.
    todo = sorted((a for a in answers if len(a.anchors)), key=len, reverse=True)
    for first in tqdm(range(0, len(todo), slots), desc="replay", unit="batch", leave=False, disable=None):
        rows += _Walk(drafter, model, todo[first : first + slots]).steps()
    if not rows:
        raise ValueError("no answer has two tokens or more: there is nothing to draft")
    return Replay(*(torch.cat(column) for column in zip(*rows, strict=True)))


class _Walk:
    """Some answers that are replayed at once, a slot each."""

    def __init__(self, drafter: Drafter, model: PreTrainedModel, answers: Sequence[Answer]):
        self.depth, self.device = drafter.draft_tokens, model.get_input_embeddings().weight.device
        self.answers = list(answers)
        self.taps: list[Tensor | None] = [None] * len(answers)
        if drafter.taps:
            with tap_reader(model, drafter.taps) as read:
                self.taps = list(read(answers).split([len(a) for a in answers]))
        self.bound: BoundDrafter = drafter.bind(model, len(answers), max(map(len, answers)) + self.depth)
        self.anchor = [answer.prompt_tokens for answer in answers]
        self._observe([0] * len(answers), self.anchor)

    def steps(self) -> Iterator[tuple[Tensor, ...]]:
        """Yields the fields of `Replay`, [live answers, D] each, step by step."""
        while self.answers:
            confidence, right, offered, known = self._propose()
            left = torch.tensor([len(x) - 1 - a for x, a in zip(self.answers, self.anchor, strict=True)])
            added = torch.minimum(right.int().cumprod(1).sum(1) + 1, left)
            yield confidence, right, offered, known, added
            ends = [a + n for a, n in zip(self.anchor, added.tolist(), strict=True)]
            self._observe(self.anchor, ends)
            self.anchor = ends
            self._retire()

    def _propose(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        zero = torch.zeros(len(self.answers), dtype=torch.int64)
        anchors = torch.tensor([x.ids[a] for x, a in zip(self.answers, self.anchor, strict=True)])
        length = torch.tensor(self.anchor)
        batch = Batch(torch.arange(len(zero)), length, anchors, zero + self.depth, zero, zero)
        drafts = self.bound.propose(batch.to(self.device)).to("cpu")
        width = drafts.token.shape[1]
        text = torch.tensor(
            [
                [*x.ids[a + 1 : a + 1 + width], *[-1] * (width - len(x.ids[a + 1 : a + 1 + width]))]
                for x, a in zip(self.answers, self.anchor, strict=True)
            ]
        )
        known = text >= 0
        offered = known & (torch.arange(width) < drafts.count[:, None])
        return drafts.confidence, offered & (drafts.token == text), offered, known

    def _observe(self, start: Sequence[int], end: Sequence[int]) -> None:
        """Hands the drafter the rows start .. end - 1 of each answer."""
        spans = list(zip(self.answers, self.taps, start, end, strict=True))
        slot = torch.cat([torch.full((b - a,), i) for i, (_, _, a, b) in enumerate(spans)])
        cell = torch.cat([torch.arange(a, b) for _, _, a, b in spans])
        token = torch.tensor([t for x, _, a, b in spans for t in x.ids[a:b]])
        taps = [rows[a:b] for _, rows, a, b in spans if rows is not None]
        committed = Committed(slot, cell, cell, token, None, (), (), (), ()).to(self.device)
        slot, cell, token = committed.slot, committed.cell, committed.token
        self.bound.observe(Committed(slot, cell, cell, token, torch.cat(taps) if taps else None, (), (), (), ()))

    def _retire(self) -> None:
        """Lets answers go that have no anchor left; the last live one takes each gap."""
        for index in reversed(range(len(self.answers))):
            if self.anchor[index] < len(self.answers[index]) - 1:
                continue
            last = len(self.answers) - 1
            if index < last:
                self.bound.move(last, index)
                self.answers[index], self.taps[index] = self.answers[last], self.taps[last]
                self.anchor[index] = self.anchor[last]
            del self.answers[last], self.taps[last], self.anchor[last]
            self.bound.free(last)
