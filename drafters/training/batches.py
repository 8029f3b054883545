"""`TrainingBatch`: the tensors of one training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_dcut.drafters.training.answers import Answer, Piece
from hf_dcut.types import Record


@dataclass(frozen=True, slots=True)
class TrainingBatch(Record):
    """n blocks in each of R answers.

    Attributes:
        taps: [R, L, F] tapped hidden states, zero beyond an answer's end.
        anchor: int64 [R, n], positions the blocks start at.
        token: int64 [R, n], tokens there.
        label: int64 [R, n, D], the tokens after them as draft tokens; -1 where there is none: past the answer's end,
            not in the draft vocabulary, or a row that only fills up the batch.
        states: [R, n, D, hidden], what the target's head made each of these tokens from; None where nobody asks.
    """

    taps: Tensor
    anchor: Tensor
    token: Tensor
    label: Tensor
    states: Tensor | None = None


def collate(
    rows: Sequence[Piece],
    answers: Sequence[Answer],
    taps: Callable[[Answer], Tensor],
    depth: int,
    to_draft: Tensor | None,
    width: int | None = None,
) -> TrainingBatch:
    """Returns the batch of some pieces.

    Args:
        rows: one for each row of the batch.
        answers: what the pieces index.
        taps: gives the taps [tokens, F] of an answer, with the states of the target's head behind them if need be.
        depth: D, drafts a block.
        to_draft: int64 [V], draft token of each token, -1 for those that cannot be drafted; None for all.
        width: F where states follow; None where none do.
    """
    found = [taps(answers[row.index]) for row in rows]
    read = [own[: row.anchors[-1], :width] for own, row in zip(found, rows, strict=True)]
    count = max(len(row.anchors) for row in rows)
    # Position 1 fills up: it has a context, and its labels are taken away.
    anchor = torch.ones(len(rows), count, dtype=torch.int64)
    token = torch.zeros(len(rows), count, dtype=torch.int64)
    label = torch.full((len(rows), count, depth), -1, dtype=torch.int64)
    states = None if width is None else found[0].new_zeros(*label.shape, found[0].shape[1] - width)
    for index, row in enumerate(rows):
        ids = torch.tensor([*answers[row.index].ids, *[-1] * depth], dtype=torch.int64)
        places, used = torch.tensor(row.anchors), len(row.anchors)
        anchor[index, :used], token[index, :used] = places, ids[places]
        behind = places[:, None] + torch.arange(1, depth + 1)
        label[index, :used] = ids[behind]
        if states is not None:
            # The state at a position makes the token after it.
            states[index, :used] = found[index][(behind - 1).clamp_max(len(found[index]) - 1), width:]
    if to_draft is not None:
        label = torch.where(label < 0, label, to_draft[label])
    return TrainingBatch(pad_sequence(read, batch_first=True), anchor, token, label, states)
