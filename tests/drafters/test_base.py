"""What all drafters share."""

from __future__ import annotations

import pytest
import torch

from hf_dcut.drafters.base import BoundDrafter, Drafter, token_history
from hf_dcut.types import Committed


@pytest.mark.parametrize("kind", [Drafter, BoundDrafter])
def test_every_method_must_be_written(kind: type) -> None:
    with pytest.raises(TypeError, match="abstract"):
        kind()


def test_committed_tokens_are_written_where_they_belong() -> None:
    tokens = torch.full((2, 4), -1)
    slot, cell, token = torch.tensor([1, 0, 1]), torch.tensor([0, 2, 3]), torch.tensor([7, 8, 9])
    token_history(tokens, Committed(slot, cell, cell, token, None, (), (), (), ()))
    assert tokens.tolist() == [[-1, -1, 8, -1], [7, -1, -1, 9]]
