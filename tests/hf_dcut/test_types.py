"""Records move whole, and a chain is a chain."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

from hf_dcut.branching import parents
from hf_dcut.types import Drafts, Proposal


def drafts() -> Drafts:
    return Drafts.chain(torch.tensor([[5, 6, 7], [8, 9, 10]]), torch.ones(2, 3))


def test_each_draft_of_a_chain_follows_the_one_before() -> None:
    assert parents(drafts()).tolist() == [[-1, 0, 1], [-1, 0, 1]]
    assert drafts().parent is None, "chains need not say so"
    assert drafts().count.tolist() == [3, 3]


def test_a_chain_may_be_shorter_than_its_row() -> None:
    short = Drafts.chain(torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3), torch.tensor([0, 2]))
    assert short.count.tolist() == [0, 2]


def test_first_nodes() -> None:
    proposal = Proposal(torch.rand(2, 3, 4))
    numbers = torch.tensor([[0.5, 0.25, 1.0], [1.0, 0.5, 0.75]])
    parent, count = torch.tensor([[-1, -1, 0], [-1, 0, -1]]), torch.tensor([1, 3])
    first = Drafts(drafts().token, count, numbers, parent, proposal).first(2)
    assert first.token.tolist() == [[5, 6], [8, 9]]
    assert first.parent is not None
    assert first.parent.tolist() == [[-1, -1], [-1, 0]]
    assert first.count.tolist() == [1, 2]
    assert first.confidence.tolist() == [[0.5, 0.25], [1.0, 0.5]]
    assert first.proposal is proposal
    assert drafts().first(1).parent is None
    assert torch.equal(drafts().first(9).token, drafts().token)


def test_a_record_that_is_there_already_is_not_copied() -> None:
    record = drafts()
    assert record.to("cpu") is record


def test_moving_takes_inner_records_along() -> None:
    proposal = Proposal(torch.rand(2, 3, 4))
    columns = [getattr(drafts(), name) for name in ("token", "count", "confidence")]
    record = Drafts(*columns, parents(drafts()), proposal)
    moved = record.to("meta")
    assert moved.proposal is not None
    assert moved.parent is not None
    found = (moved.token, moved.parent, moved.count, moved.confidence, moved.proposal.probability)
    assert {t.device.type for t in found} == {"meta"}
    assert record.token.device.type == "cpu"


def test_records_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        drafts().count = torch.zeros(2)  # type: ignore[misc]
