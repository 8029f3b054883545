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
    """

    taps: Tensor
    anchor: Tensor
    token: Tensor
    label: Tensor


def collate(
    rows: Sequence[Piece],
    answers: Sequence[Answer],
    taps: Callable[[Answer], Tensor],
    depth: int,
    to_draft: Tensor | None,
) -> TrainingBatch:
    """Returns the batch of some pieces.

    Args:
        rows: one for each row of the batch.
        answers: what the pieces index.
        taps: gives the taps [tokens, F] of an answer.
        depth: D, drafts a block.
        to_draft: int64 [V], draft token of each token, -1 for those that cannot be drafted; None for all.
    """
    read = [taps(answers[row.index])[: row.anchors[-1]] for row in rows]
    count = max(len(row.anchors) for row in rows)
    # Position 1 fills up: it has a context, and its labels are taken away.
    anchor = torch.ones(len(rows), count, dtype=torch.int64)
    token = torch.zeros(len(rows), count, dtype=torch.int64)
    label = torch.full((len(rows), count, depth), -1, dtype=torch.int64)
    for index, row in enumerate(rows):
        ids = torch.tensor([*answers[row.index].ids, *[-1] * depth], dtype=torch.int64)
        places, used = torch.tensor(row.anchors), len(row.anchors)
        anchor[index, :used], token[index, :used] = places, ids[places]
        label[index, :used] = ids[places[:, None] + torch.arange(1, depth + 1)]
    if to_draft is not None:
        label = torch.where(label < 0, label, to_draft[label])
    return TrainingBatch(pad_sequence(read, batch_first=True), anchor, token, label)
