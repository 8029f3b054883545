"""Each request's own processors and criteria, made from what the user gave `generate` for all of them.

Transformers makes one list for a batch. That list can be shared while its members look at scores alone. Others hold
the padding of all rows, count requests by row, or keep a state, so each request gets a list made for its row alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from hf_dcut.choosing import reads_scores_alone

AllowedTokens = Callable[[int, Tensor], list[int]]


class PerRequest(LogitsProcessor):
    """A processor with a state, one instance a request: a grammar, say. Works with plain `generate` too.

    Args:
        factory: called with a request's row in the batch, returns its processor. That one is called once for every
            committed token, in order, with ids int64 [1, n] and scores float32 [1, V].
    """

    def __init__(self, factory: Callable[[int], Any]):
        self.factory = factory
        self._rows: dict[int, Any] = {}

    def of(self, row: int) -> Any:
        """Returns a new processor for a row."""
        return self.factory(row)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns processed scores float32 [B, V]: plain `generate`'s way, all rows at once, each by its own processor.

        Use a fresh `PerRequest` for every plain `generate`, since the rows' processors stay in it.
        """
        for row in range(len(scores)):
            self._rows.setdefault(row, None)
            self._rows[row] = self._rows[row] or self.of(row)
        return torch.cat([self._rows[row](input_ids[row : row + 1], scores[row : row + 1]) for row in range(len(scores))])


@dataclass(frozen=True)
class Given:
    """What the user gave for the choice of tokens, besides the generation config.

    Attributes:
        processors: the user's own `logits_processor`.
        allowed: the user's `prefix_allowed_tokens_fn`.
    """

    processors: LogitsProcessorList | None = None
    allowed: AllowedTokens | None = None


def processors_of(
    model: PreTrainedModel,
    config: GenerationConfig,
    prepared: LogitsProcessorList,
    given: Given,
    input_ids: Tensor,
    mask: Tensor | None,
) -> list[LogitsProcessorList]:
    """Returns the processors of each of the B requests; the same list for all where that is the same thing.

    Args:
        model: whose `generate` was called.
        config: final.
        prepared: what Transformers made for the whole batch.
        given: what it was made from.
        input_ids: int64 [B, P], left-padded.
        mask: int64 [B, P], or None without padding.
    """
    if reads_scores_alone(prepared):
        return [prepared] * len(input_ids)
    return [_for_row(model, config, given, row, input_ids, mask) for row in range(len(input_ids))]


def criteria_of(prepared: StoppingCriteriaList) -> tuple[StoppingCriteriaList, frozenset[int], int]:
    """Returns what is asked after each token, the end tokens, and the longest width, int, prompt and padding included."""
    asked = StoppingCriteriaList(c for c in prepared if not isinstance(c, (EosTokenCriteria, MaxLengthCriteria)))
    ends = [c.eos_token_id.flatten().tolist() for c in prepared if isinstance(c, EosTokenCriteria)]
    widths = [c.max_length for c in prepared if isinstance(c, MaxLengthCriteria)]
    return asked, frozenset(token for ids in ends for token in ids), min(widths)


def _for_row(
    model: PreTrainedModel, config: GenerationConfig, given: Given, row: int, input_ids: Tensor, mask: Tensor | None
) -> LogitsProcessorList:
    """Returns the list that Transformers would make for one row alone, the row keeping its number."""
    own = None if given.processors is None else LogitsProcessorList(_own(p, row, len(input_ids)) for p in given.processors)
    ids = input_ids[row : row + 1]
    return model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=input_ids.shape[1],
        encoder_input_ids=ids,
        prefix_allowed_tokens_fn=None if given.allowed is None else partial(_numbered, given.allowed, row),
        logits_processor=own,
        device=input_ids.device,
        model_kwargs={} if mask is None else {"attention_mask": mask[row : row + 1]},
    )


def _own(processor: Any, row: int, rows: int) -> Any:
    """Returns a user's processor for one row: from its factory, or a copy, so that a state is not shared by requests."""
    if isinstance(processor, PerRequest):
        return processor.of(row)
    return processor if rows == 1 else copy.deepcopy(processor)


def _numbered(allowed: AllowedTokens, row: int, _: int, ids: Tensor) -> list[int]:
    """Returns the tokens allowed next, asked with the row's number in the batch instead of in the list's own, 0."""
    return allowed(row, ids)
