"""Requests end where they should and know where they stand."""

from __future__ import annotations

import torch
from transformers import StoppingCriteriaList

from hf_dcut.requests import Request, batch_of

NONE = torch.zeros(0, 5)  # scores that nobody keeps


def test_tokens_are_taken_up_to_the_first_end_token() -> None:
    request = Request(id=0, prompt=[1, 2], max_new_tokens=9, eos=frozenset({5, 6}))
    assert request.append([3, 4], NONE) == 2
    assert request.finish_reason is None
    assert request.append([7, 6, 5], NONE) == 2
    assert (request.tokens, request.finish_reason) == ([3, 4, 7, 6], "eos")


def test_tokens_are_taken_up_to_the_length() -> None:
    request = Request(id=0, prompt=[1, 2], max_new_tokens=3)
    assert request.append([3, 4, 5, 6], NONE) == 3
    assert (request.tokens, request.finish_reason) == ([3, 4, 5], "length")


def test_an_end_token_at_the_length_is_an_end() -> None:
    request = Request(id=0, prompt=[1], max_new_tokens=2, eos=frozenset({5}))
    assert (request.append([3, 5], NONE), request.finish_reason) == (2, "eos")


def test_a_criterion_is_asked_with_the_padded_text_after_each_token() -> None:
    widths = []

    def wide(ids: torch.Tensor, scores: object) -> torch.Tensor:
        widths.append(ids.shape[1])
        return ids[:, -1] == 8

    criteria = StoppingCriteriaList([wide])
    request = Request(id=0, prompt=[1, 2], max_new_tokens=9, left_pads=3, eos=frozenset({6}), criteria=criteria)
    assert (request.append([7, 7], NONE), request.finish_reason) == (2, None)
    assert (request.append([7, 8, 9], NONE), request.finish_reason) == (2, "stop")
    assert widths == [6, 7, 8, 9]
    again = Request(id=0, prompt=[1, 2], max_new_tokens=2, eos=frozenset({6}), criteria=criteria)
    assert (again.append([8, 6], NONE), again.finish_reason) == (1, "stop")


def test_criteria_are_asked_once_about_each_token_also_by_those_who_look_ahead() -> None:
    asked = []

    def at_eight(ids: torch.Tensor, scores: object) -> torch.Tensor:
        asked.append(ids[0].tolist())
        return ids[:, -1] == 8

    request = Request(id=0, prompt=[1], max_new_tokens=9, eos=frozenset({6}), criteria=StoppingCriteriaList([at_eight]))
    request.append([2], NONE)
    assert request.ending([3], NONE) is None
    assert request.ending([3, 8], NONE) == "stop"
    assert (request.tokens, request.finish_reason) == ([2], None), "looking ahead commits nothing"
    assert request.append([3, 8, -1], NONE) == 2
    assert (request.tokens, request.finish_reason) == ([2, 3, 8], "stop")
    assert asked == [[1, 2], [1, 2, 3], [1, 2, 3, 8]]


def test_criteria_are_asked_about_the_last_token_too() -> None:
    asked = []
    criteria = StoppingCriteriaList([lambda ids, scores: asked.append(ids.shape[1]) or False])
    request = Request(id=0, prompt=[1], max_new_tokens=9, eos=frozenset({6}), criteria=criteria)
    assert (request.append([3, 6], NONE), request.finish_reason) == (2, "eos")
    assert asked == [2, 3]


def test_criteria_get_the_scores_that_are_kept() -> None:
    given = []

    def never(ids: torch.Tensor, scores: tuple[torch.Tensor, ...] | None) -> torch.Tensor:
        given.append(scores if scores is None else [row.tolist() for row in scores])
        return torch.tensor([False])

    for keeps in (False, True):
        criteria = StoppingCriteriaList([never])
        request = Request(id=0, prompt=[1], max_new_tokens=9, criteria=criteria, keeps_scores=keeps)
        request.append([3], torch.tensor([[1.0, 2.0]]))
        request.append([4, 5], torch.tensor([[3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]))
    first, second, third = ([[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]])
    assert given == [None] * 3 + [[first], [first, second], [first, second, third]]


def test_length_and_room_count_the_anchor_apart() -> None:
    request = Request(id=0, prompt=[1, 2, 3], max_new_tokens=4)
    assert (request.decoding, request.length) == (False, 0)
    request.read = 2
    assert (request.decoding, request.length) == (False, 2)
    request.read = 3
    request.append([7], NONE)
    assert (request.decoding, request.length, request.room) == (True, 3, 2)
    request.append([8, 9], NONE)
    assert (request.length, request.room) == (5, 0)


def test_batch_columns() -> None:
    first = Request(id=0, prompt=[1, 2], max_new_tokens=9, seed=3, rope=4, slot=0, read=2, tokens=[7, 8])
    second = Request(id=1, prompt=[1], max_new_tokens=2, slot=1, read=1, tokens=[9])
    batch = batch_of([first, second], "cpu")
    columns = [getattr(batch, name).tolist() for name in ("slot", "length", "anchor", "room", "seed", "rope")]
    assert columns == [[0, 1], [3, 1], [8, 9], [6, 0], [3, 0], [4, 0]]
    assert batch.slot.dtype == torch.int64
    assert len(batch_of([], "cpu")) == 0
