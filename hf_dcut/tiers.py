"""The processors of Transformers that many rows can go through at once, in two tiers by what they look at.

    scores alone   temperature, top-k, top-p, ..             any rows in one call
    the text       penalties, bans, biases, minimum lengths  any rows in one call, or in one call for each side of a
                                                             length, each row with the ids before it

Whatever else a list holds may keep a state: from its first such member on, a list is the third tier, and is walked
(`choosing.py`). So is a subclass, which may do anything.

Rows of a step have texts of different length. They stand right-aligned in one tensor:

    text       a b c d     draft e, then f          a b c d e, a b c d e f, g h
    ids        [. a b c d e]
               [a b c d e f]                        . is `BLANK`, an id of no token
               [. . . . g h]

What compares ids finds nothing in the blanks, which are at the left end, and what counts ids is called with the length
that it would see in `generate`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as upstream

# Far beyond any vocabulary; such ids are counted as one token outside of it, which is dropped.
BLANK = 2**62

SCORES_ALONE = {
    upstream.TemperatureLogitsWarper,
    upstream.TopKLogitsWarper,
    upstream.TopPLogitsWarper,
    upstream.TopHLogitsWarper,
    upstream.MinPLogitsWarper,
    upstream.TypicalLogitsWarper,
    upstream.EpsilonLogitsWarper,
    upstream.EtaLogitsWarper,
    upstream.InfNanRemoveLogitsProcessor,
    upstream.LogitNormalization,
    upstream.SuppressTokensLogitsProcessor,
}
# These find ids in the text, wherever it begins.
_IDS = {
    upstream.RepetitionPenaltyLogitsProcessor,
    upstream.EncoderRepetitionPenaltyLogitsProcessor,
    upstream.NoRepeatNGramLogitsProcessor,
    upstream.EncoderNoRepeatNGramLogitsProcessor,
    upstream.SequenceBiasLogitsProcessor,
    upstream.NoBadWordsLogitsProcessor,
}
# These count the ids. What each makes of a length: rows of which it makes the same are treated alike.
_LENGTH: dict[type, Callable[[Any, int], object]] = {
    upstream.MinLengthLogitsProcessor: lambda own, length: length < own.min_length,
    upstream.MinNewTokensLengthLogitsProcessor: lambda own, length: (
        length - own.prompt_length_to_skip < own.min_new_tokens
    ),
    upstream.ForcedBOSTokenLogitsProcessor: lambda own, length: length == 1,
    upstream.ForcedEOSTokenLogitsProcessor: lambda own, length: length == own.max_length - 1,
    upstream.SuppressTokensAtBeginLogitsProcessor: lambda own, length: length == own.begin_index,
    upstream.ExponentialDecayLengthPenalty: lambda own, length: max(length, own.regulation_start),
    # Looks at the last ids too, as many as there must be.
    upstream.WatermarkLogitsProcessor: lambda own, length: min(length, own.context_width),
}


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The text before each of n rows.

    Attributes:
        ids: int64 [n, W], right-aligned, `BLANK` on the left.
        length: how many ids each row has.
        row: which row of the batch each one's processors take it for.
    """

    ids: Tensor
    length: Sequence[int]
    row: Sequence[int]


def reads_scores_alone(processors: Iterable[object]) -> bool:
    """Returns whether none of the processors looks at ids or keeps a state."""
    return all(type(processor) in SCORES_ALONE for processor in processors)


def is_known(processor: object) -> bool:
    """Returns whether a processor keeps no state, so that many rows can go through it at once, rejected ones too."""
    return type(processor) in SCORES_ALONE | _IDS | _LENGTH.keys()


def align(texts: Sequence[Tensor], lengths: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
    """Returns prefixes of texts, int64 [n, W], right-aligned with `BLANK` on the left, and their lengths.

    Args:
        texts: int64 [m] each.
        lengths: of the prefixes wanted of each text.
    """
    length = [own for each in lengths for own in each]
    device, width = texts[0].device, max(length)
    begins = torch.tensor([0, *(len(text) for text in texts)]).cumsum(0).tolist()
    begin = torch.tensor([begins[k] for k, each in enumerate(lengths) for _ in each], device=device)
    place = torch.arange(-width, 0, device=device) + torch.tensor(length, device=device)[:, None]
    ids = torch.cat(list(texts))[begin[:, None] + place.clamp_min(0)]
    return ids.masked_fill(place < 0, BLANK), length


def process(processors: Iterable[Any], scores: Tensor, prefixes: Prefixes | None = None) -> Tensor:
    """Returns the processed scores, float32 [n, V], of rows that go through the same processors.

    Args:
        processors: known ones.
        scores: float32 [n, V].
        prefixes: the text before each row; not needed by processors that look at scores alone.
    """
    nothing = torch.empty(len(scores), 0, dtype=torch.int64, device=scores.device)
    for processor in processors:
        if type(processor) in SCORES_ALONE:
            scores = processor(nothing, scores)
            continue
        assert prefixes is not None, f"{type(processor).__name__} reads the text"
        if type(processor) in _IDS:
            blanks = torch.tensor(prefixes.length).neg() + prefixes.ids.shape[1]
            scores = of_rows(processor, prefixes.row, blanks)(prefixes.ids, scores)
        else:
            scores = _by_length(processor, scores, prefixes)
    return scores


def of_rows(processor: Any, row: Sequence[int], blanks: Tensor | None = None) -> Any:
    """Returns the processor for n rows: a copy where it holds something for each row of a batch.

    Args:
        processor: a known one, for a whole batch.
        row: n rows of that batch.
        blanks: int64 [n], how many ids on the left of each row are none; none when None.
    """
    kind, own = type(processor), copy.copy(processor)
    if kind is upstream.RepetitionPenaltyLogitsProcessor:
        pads = processor.prompt_ignore_length
        if pads is None:
            return processor
        pads = pads[list(row)] if isinstance(pads, Tensor) else torch.full((len(row),), pads)
        own.prompt_ignore_length = pads if blanks is None else pads + blanks.to(pads.device)
    elif kind is upstream.EncoderRepetitionPenaltyLogitsProcessor:
        own.encoder_input_ids = processor.encoder_input_ids[list(row)]
    elif kind is upstream.EncoderNoRepeatNGramLogitsProcessor:
        own.generated_ngrams, own.batch_size = [processor.generated_ngrams[k] for k in row], len(row)
    else:
        return processor
    return own


def for_batch(processor: Any, rows: int) -> Any:
    """Returns the processor holding something for each of `rows` rows, where it was made for fewer prompts.

    Raises:
        ValueError: it holds something for a number of prompts that does not fit.
    """
    kind, held = type(processor), rows
    if kind is upstream.RepetitionPenaltyLogitsProcessor and isinstance(processor.prompt_ignore_length, Tensor):
        held = len(processor.prompt_ignore_length)
    elif kind is upstream.EncoderRepetitionPenaltyLogitsProcessor:
        held = len(processor.encoder_input_ids)
    elif kind is upstream.EncoderNoRepeatNGramLogitsProcessor:
        held = processor.batch_size
    if held == rows:
        return processor
    # Upstream repeats prompts for several answers to each, but wants the padding of every row.
    if rows % held or kind is upstream.RepetitionPenaltyLogitsProcessor:
        raise ValueError(f"{kind.__name__} holds {held} prompts for {rows} requests: give it one a request")
    return of_rows(processor, [row * held // rows for row in range(rows)])


def _by_length(processor: Any, scores: Tensor, prefixes: Prefixes) -> Tensor:
    """Returns the processed scores by a processor that counts ids: a call for the rows of which it makes the same."""
    alike: dict[object, list[int]] = {}
    for index, length in enumerate(prefixes.length):
        alike.setdefault(_LENGTH[type(processor)](processor, length), []).append(index)
    processed = scores.clone()
    for rows in alike.values():
        width = min(prefixes.length[index] for index in rows)
        processed[rows] = processor(prefixes.ids[rows, -width:], scores[rows])
    return processed
