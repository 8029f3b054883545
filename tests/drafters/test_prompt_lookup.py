"""Prompt lookup against a loop over the request's text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from hf_dcut.drafters.prompt_lookup import BoundPromptLookup, PromptLookupDrafter
from hf_dcut.types import Batch, Committed, Drafts

ROUNDING = 2.0**-21  # k / (m + 1.7 / n) in float32


def look_up(text: list[int], draft_tokens: int, ngram: int) -> list[tuple[int, float]]:
    """Returns tokens and confidences drafted after `text`, whose last token is the anchor."""
    for n in range(min(ngram, len(text)), 0, -1):
        ends = [e for e in range(n, len(text)) if text[e - n : e] == text[len(text) - n :]]
        if ends:
            break
    else:
        return []
    drafts: list[tuple[int, float]] = []
    last, agreeing = ends[-1], ends
    for k in range(min(draft_tokens, len(text) - last)):
        voters = [e for e in agreeing if e + k < len(text)]
        agreeing = [e for e in voters if text[e + k] == text[last + k]]
        drafts.append((text[last + k], len(agreeing) / (len(voters) + 1.7 / (n + k))))
    return drafts


def bind(draft_tokens: int, ngram: int, slots: int, length: int = 40) -> BoundPromptLookup:
    return BoundPromptLookup(draft_tokens, ngram, slots, length, torch.device("cpu"))


def committed(slot: int, tokens: list[int], first: int = 0) -> Committed:
    """Returns the record of tokens that became part of the request in a slot."""
    cell = torch.arange(first, first + len(tokens))
    token = torch.tensor(tokens, dtype=torch.int64)
    return Committed(torch.full_like(cell, slot), cell, cell, token, None, (), (), (), ())


def batch_after(texts: list[list[int]]) -> Batch:
    """Returns the batch of requests whose texts end with their anchors."""
    length = torch.tensor([len(text) - 1 for text in texts])
    anchor, slot = torch.tensor([text[-1] for text in texts]), torch.arange(len(texts))
    return Batch(slot, length, anchor, torch.full_like(slot, 99), slot, torch.zeros_like(slot))


def propose(texts: list[list[int]], draft_tokens: int = 4, ngram: int = 2) -> Drafts:
    bound = bind(draft_tokens, ngram, len(texts))
    for slot, text in enumerate(texts):
        bound.observe(committed(slot, text[:-1]))
    return bound.propose(batch_after(texts))


def row(drafts: Drafts, index: int) -> list[tuple[int, float]]:
    count = int(drafts.count[index])
    return list(zip(drafts.token[index, :count].tolist(), drafts.confidence[index, :count].tolist(), strict=True))


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=4),
    st.integers(1, 6),
    st.integers(1, 4),
)
def test_equals_the_loop(texts: list[list[int]], draft_tokens: int, ngram: int) -> None:
    drafts = propose(texts, draft_tokens, ngram)
    for index, text in enumerate(texts):
        expected = look_up(text, draft_tokens, ngram)
        assert [token for token, _ in row(drafts, index)] == [token for token, _ in expected]
        assert [c for _, c in row(drafts, index)] == pytest.approx([c for _, c in expected], rel=ROUNDING)
    assert (drafts.token >= 0).all(), "places without a draft are tokens as well"


def test_the_longest_suffix_wins_and_then_its_last_occurrence() -> None:
    drafts = propose([[1, 2, 7, 9, 2, 8, 1, 2]])
    assert [token for token, _ in row(drafts, 0)] == [7, 9, 2, 8]
    sure = [confidence for _, confidence in row(drafts, 0)]
    assert sure == pytest.approx([1 / (1 + 1.7 / n) for n in (2, 3, 4, 5)]), "surer with every token that matches"


def test_occurrences_that_agree_make_surer() -> None:
    (first, second) = row(propose([[5, 6, 5, 6, 5, 7, 5, 6, 9, 5]], draft_tokens=2, ngram=1), 0)
    assert first == (6, pytest.approx(3 / 5.7)), "three of four say 6"
    assert second == (9, pytest.approx(1 / 3.85)), "one of those three says 9, behind two tokens"


def test_nothing_to_copy_gives_no_drafts() -> None:
    assert propose([[1, 2, 3], [4]]).count.tolist() == [0, 0]


def test_the_history_grows_step_by_step() -> None:
    text, bound = [3, 4, 5, 3, 4, 6, 3, 4], bind(4, 2, 1)
    bound.observe(committed(0, text[:3]))
    bound.propose(batch_after([[*text[:3], 9]]))  # an anchor that was written but is another one below
    bound.observe(committed(0, text[3:7], first=3))
    assert row(bound.propose(batch_after([text])), 0) == row(propose([text]), 0)


def test_the_text_of_a_freed_slot_is_not_looked_up() -> None:
    bound = bind(4, 1, 1)
    bound.observe(committed(0, [1, 2, 3, 4, 5]))
    bound.free(0)
    bound.observe(committed(0, [3, 9]))
    assert row(bound.propose(batch_after([[3, 9, 3]])), 0) == [
        (9, pytest.approx(1 / 2.7)),
        (3, pytest.approx(1 / 1.85)),
    ]


def test_moved_requests_keep_their_text() -> None:
    texts, bound = [[1, 1], [2, 7, 2, 7, 2]], bind(4, 2, 2)
    for slot, text in enumerate(texts):
        bound.observe(committed(slot, text[:-1]))
    bound.move(1, 0)
    bound.free(1)
    assert row(bound.propose(batch_after(texts[1:])), 0) == row(propose(texts[1:]), 0)


@pytest.mark.parametrize("name", ["draft_tokens", "max_matching_ngram_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, None])
def test_bad_sizes_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r}: give a positive integer"):
        PromptLookupDrafter(**{name: value})


def test_any_target_fits(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    drafter = PromptLookupDrafter(3)
    drafter.check(tiny_llama())
    bound = drafter.bind(tiny_llama(), slots=2, length=8)
    assert bound.tokens.numel() * bound.tokens.itemsize == drafter.cell_bytes(tiny_llama()) * 2 * 8
    assert drafter.fingerprint() == {"kind": "prompt lookup", "draft_tokens": 3, "ngram": 4}
