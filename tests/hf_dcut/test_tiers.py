"""Many rows at once are what each row alone is, for every processor of Transformers that is known to keep no state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor
from transformers.generation import logits_process as upstream

from hf_dcut import tiers
from hf_dcut.tiers import BLANK, Prefixes, align, for_batch, is_known, of_rows, process, reads_scores_alone

V, ROWS = 23, 3
PROMPTS = torch.randint(0, V, (ROWS, 6), generator=torch.Generator().manual_seed(5))
PADS = torch.tensor([2, 0, 4])
ENDS = torch.tensor([4, 7])

# Each for a batch of three rows; thresholds lie among the lengths of the rows below.
PREFIXED: dict[str, Callable[[], Any]] = {
    "penalty": lambda: upstream.RepetitionPenaltyLogitsProcessor(1.7, PADS),
    "penalty of all": lambda: upstream.RepetitionPenaltyLogitsProcessor(0.6),
    "penalty behind the prompt": lambda: upstream.RepetitionPenaltyLogitsProcessor(2.0, 3),
    "prompt penalty": lambda: upstream.EncoderRepetitionPenaltyLogitsProcessor(0.4, PROMPTS),
    "no token twice": lambda: upstream.NoRepeatNGramLogitsProcessor(1),
    "no bigram twice": lambda: upstream.NoRepeatNGramLogitsProcessor(2),
    "no sixgram twice": lambda: upstream.NoRepeatNGramLogitsProcessor(6),
    "no token of the prompt": lambda: upstream.EncoderNoRepeatNGramLogitsProcessor(1, PROMPTS),
    "no bigram of the prompt": lambda: upstream.EncoderNoRepeatNGramLogitsProcessor(2, PROMPTS),
    "no fivegram of the prompt": lambda: upstream.EncoderNoRepeatNGramLogitsProcessor(5, PROMPTS),
    "bias": lambda: upstream.SequenceBiasLogitsProcessor([[[3], 2.0], [[1, 2], -4.0], [[2, 1, 0, 5, 6, 7], 9.0]]),
    "bad words": lambda: upstream.NoBadWordsLogitsProcessor([[3], [1, 2], [2, 1, 0]], ENDS),
    "minimum length": lambda: upstream.MinLengthLogitsProcessor(7, ENDS),
    "minimum of new tokens": lambda: upstream.MinNewTokensLengthLogitsProcessor(4, 3, ENDS),
    "first token": lambda: upstream.ForcedBOSTokenLogitsProcessor(5),
    "last token": lambda: upstream.ForcedEOSTokenLogitsProcessor(8, ENDS),
    "not first": lambda: upstream.SuppressTokensAtBeginLogitsProcessor([3, 4, 5], 6),
    "growing wish to end": lambda: upstream.ExponentialDecayLengthPenalty((1, 1.4), ENDS, 4),
    "green list": lambda: upstream.WatermarkLogitsProcessor(V, "cpu"),
    "green list of three": lambda: upstream.WatermarkLogitsProcessor(V, "cpu", context_width=3),
    "left hash green list": lambda: upstream.WatermarkLogitsProcessor(
        64, "cpu", seeding_scheme="selfhash", context_width=2
    ),
}
WARPERS: dict[str, Callable[[], Any]] = {
    "temperature": lambda: upstream.TemperatureLogitsWarper(0.5),
    "top_k": lambda: upstream.TopKLogitsWarper(3),
    "normalised": upstream.LogitNormalization,
}


def rows_of(seed: int, sizes: list[tuple[int, int, int]]) -> tuple[Prefixes, list[list[int]], torch.Tensor]:
    """Returns prefixes, the same as plain lists, and scores, for texts of (row, ids, prefixes).

    Ids are few, so that n-grams come again.
    """
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(0, 5, (size,), generator=generator) for _, size, _ in sizes]
    lengths = [range(size - count + 1, size + 1) for _, size, count in sizes]
    ids, length = align(texts, lengths)
    plain = [text[:end].tolist() for text, ends in zip(texts, lengths, strict=True) for end in ends]
    row = [row for row, _, count in sizes for _ in range(count)]
    return Prefixes(ids, length, row), plain, torch.randn(len(plain), 64, generator=generator)[:, :V] * 3


SIZES = st.tuples(st.integers(0, ROWS - 1), st.integers(5, 12), st.integers(1, 5))


@pytest.mark.parametrize("make", {**PREFIXED, **WARPERS}.values(), ids={**PREFIXED, **WARPERS})
@settings(deadline=None, max_examples=15)
@given(sizes=st.lists(SIZES, min_size=1, max_size=6), seed=st.integers(0, 999))
def test_rows_together_are_what_they_are_alone(
    make: Callable[[], Any], sizes: list[tuple[int, int, int]], seed: int
) -> None:
    prefixes, plain, scores = rows_of(seed, sizes)
    processor, alone = make(), make()
    if isinstance(processor, upstream.WatermarkLogitsProcessor):
        scores = torch.cat([scores, scores, scores], dim=1)[:, :64]  # it looks at the best 40
    before, together = scores.clone(), process([processor], scores, prefixes)
    for k, ids in enumerate(plain):
        # Alone: as in plain `generate`, a batch of rows of one length, of which only this one counts.
        batch = torch.tensor([ids] * ROWS), scores[k].expand(ROWS, -1)
        assert torch.equal(together[k], alone(*batch)[prefixes.row[k]])
    assert torch.equal(scores, before), "what is given is not written to"


def test_the_whole_list_in_order() -> None:
    makers = [PREFIXED["penalty"], PREFIXED["no bigram twice"], PREFIXED["growing wish to end"], WARPERS["top_k"]]
    prefixes, plain, scores = rows_of(3, [(0, 9, 4), (2, 5, 1), (1, 12, 3)])
    together = process([make() for make in makers], scores, prefixes)
    for k, ids in enumerate(plain):
        alone = scores[k].expand(ROWS, -1)
        for make in makers:
            alone = make()(torch.tensor([ids] * ROWS), alone)
        assert torch.equal(together[k], alone[prefixes.row[k]])


def test_every_known_kind_is_tried_here() -> None:
    tried = {type(make()) for make in PREFIXED.values()}
    assert tried == tiers._IDS | tiers._LENGTH.keys()


def test_what_is_known() -> None:
    class Hotter(upstream.TemperatureLogitsWarper):
        pass

    class Mine(LogitsProcessor):
        pass

    warpers = [make() for make in WARPERS.values()]
    assert reads_scores_alone(warpers)
    assert reads_scores_alone([])
    assert not any(reads_scores_alone([*warpers, make()]) for make in PREFIXED.values())
    assert all(is_known(make()) for make in {**WARPERS, **PREFIXED}.values())
    stateful = upstream.SynthIDTextWatermarkLogitsProcessor(3, [1, 2], 16, 0, 4, "cpu")
    allowed = upstream.PrefixConstrainedLogitsProcessor(lambda row, ids: [1], 1)
    for other in (Mine(), Hotter(0.5), stateful, allowed):
        assert not is_known(other), "may keep a state; a subclass may do anything"


def test_prefixes_are_right_aligned() -> None:
    ids, length = align([torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([7, 8])], [[5, 6], [2]])
    b = BLANK
    assert ids.tolist() == [[b, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], [b, b, b, b, 7, 8]]
    assert length == [5, 6, 2]


def test_what_is_made_for_fewer_prompts_is_spread_over_their_answers() -> None:
    prompts = torch.tensor([[1, 2], [3, 4]])
    penalty = for_batch(upstream.EncoderRepetitionPenaltyLogitsProcessor(1.5, prompts), 6)
    assert penalty.encoder_input_ids.tolist() == [[1, 2]] * 3 + [[3, 4]] * 3
    bans = for_batch(upstream.EncoderNoRepeatNGramLogitsProcessor(2, prompts), 4)
    assert bans.generated_ngrams == [{(1,): [2]}] * 2 + [{(3,): [4]}] * 2
    assert of_rows(bans, [3, 0]).generated_ngrams == [{(3,): [4]}, {(1,): [2]}]
    same = upstream.EncoderRepetitionPenaltyLogitsProcessor(1.5, prompts)
    assert for_batch(same, 2) is same


@pytest.mark.parametrize(
    ("processor", "rows", "held"),
    [
        (upstream.EncoderRepetitionPenaltyLogitsProcessor(1.5, torch.zeros(2, 3).long()), 3, 2),
        (upstream.EncoderNoRepeatNGramLogitsProcessor(2, torch.zeros(4, 3).long()), 2, 4),
        (upstream.RepetitionPenaltyLogitsProcessor(1.5, torch.tensor([0, 1])), 4, 2),
    ],
    ids=["3 rows of 2 prompts", "2 rows of 4 prompts", "padding of too few rows"],
)
def test_a_number_of_prompts_that_does_not_fit(processor: Any, rows: int, held: int) -> None:
    with pytest.raises(ValueError, match=f"{type(processor).__name__} holds {held} prompts for {rows} requests: give"):
        for_batch(processor, rows)


def test_text_must_be_there_for_what_reads_it() -> None:
    with pytest.raises(AssertionError, match="NoRepeatNGramLogitsProcessor reads the text"):
        process([PREFIXED["no token twice"]()], torch.zeros(1, V))
