"""What processors and criteria are shown, and that a token costs as much at the end of a long text as at its start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessorList, StoppingCriteriaList

from hf_dcut.choosing import choose
from hf_dcut.requests import Request
from hf_dcut.text import Text
from hf_dcut.types import Packed

CPU = torch.device("cpu")


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=6), st.data())
def test_what_is_shown_is_the_text_and_stays_as_it_was(blocks: list[list[int]], data: st.DataObject) -> None:
    text, tokens, shown = Text([7, 8], 30, CPU), [], []
    for block in blocks:
        # As a walk does: one token ahead after the other, and all of them become part of the text.
        for count in range(data.draw(st.integers(0, len(block)), "looked ahead")):
            shown.append((text.show(tokens, block[:count]), [7, 8, *tokens, *block[:count]]))
        tokens = tokens + block
        if data.draw(st.booleans(), "shown in between"):
            shown.append((text.show(tokens), [7, 8, *tokens]))
    shown.append((text.show(tokens), [7, 8, *tokens]))
    for ids, plain in shown:
        assert ids.tolist() == [plain]
        assert ids.dtype == torch.int64


class Counting(TorchDispatchMode):
    """Counts the numbers that torch operations write; views write none."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.written += out.numel()
        return out


LONG = 2_000


@pytest.mark.parametrize("shown", [0, 1])
def test_a_criterion_costs_the_same_for_every_token(shown: int) -> None:
    widths = []

    def never(ids: torch.Tensor, scores: Any) -> bool:
        widths.append(ids.shape[1])
        return False

    request = Request(0, [1] * 500, LONG, criteria=StoppingCriteriaList([never]), keeps_scores=bool(shown))
    counts = []
    for token in range(LONG - 1):
        with Counting() as counting:
            request.append([token], torch.zeros(1, 3))
        counts.append(counting.written)
    assert widths == list(range(501, 500 + LONG))
    assert counts[0] >= 500, "the prompt is written once"
    assert max(counts[1:]) == min(counts[1:]) < 20
    assert request.text(CPU).tolist() == [[1] * 500 + list(range(LONG - 1))]


def test_a_walk_costs_the_same_for_every_token() -> None:
    def same(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores

    counts = []
    for before in (10, LONG):
        request = Request(0, [1] * before, 99, read=before, tokens=[2], walked=LogitsProcessorList([same]))
        request.text(CPU)
        row = torch.arange(3)
        packed = Packed(
            **{"token": torch.tensor([2, 0, 0]), "slot": 0 * row, "cell": before + row, "position": before + row},
            **{"node": row - 1, "start": torch.tensor([0, 3], dtype=torch.int32), "used": torch.zeros(1).int()},
            **{"logit_rows": row, "decoding": 1, "slots": 1, "reach": 0, "width": 3},
        )
        with Counting() as counting:
            assert choose(torch.zeros(3, 4), packed, [request]).token.tolist() == [0, 0, 0]
        counts.append(counting.written)
    assert counts[0] == counts[1]
