"""Each request's own processors and criteria, made from what the user gave `generate` for all of them.

Transformers makes one list for a batch. That list can be shared while its members look at scores alone. Others hold
the padding of all rows, count requests by row, or keep a state, so each request gets a list made for its row alone.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, PrefixConstrainedLogitsProcessor

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
        self._rows |= {row: self.of(row) for row in range(len(scores)) if row not in self._rows}
        rows = zip(input_ids.split(1), scores.split(1), strict=True)
        return torch.cat([self._rows[row](*own) for row, own in enumerate(rows)])


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
    # Upstream asks for allowed tokens by groups of rows that share a prompt; a row alone is a group of one.
    alone, answers = copy.copy(config), config.num_return_sequences or 1
    alone.num_return_sequences = 1
    return [_for_row(model, alone, given, row, answers, input_ids, mask) for row in range(len(input_ids))]


def criteria_of(prepared: StoppingCriteriaList) -> tuple[StoppingCriteriaList, frozenset[int], int]:
    """Returns what is asked after each token, the end tokens, and the longest width, int, prompts and padding too."""
    asked = StoppingCriteriaList(c for c in prepared if not isinstance(c, (EosTokenCriteria, MaxLengthCriteria)))
    ends = [c.eos_token_id.flatten().tolist() for c in prepared if isinstance(c, EosTokenCriteria)]
    widths = [c.max_length for c in prepared if isinstance(c, MaxLengthCriteria)]
    return asked, frozenset(token for ids in ends for token in ids), min(widths)


def _for_row(
    model: PreTrainedModel,
    config: GenerationConfig,
    given: Given,
    row: int,
    answers: int,
    input_ids: Tensor,
    mask: Tensor | None,
) -> LogitsProcessorList:
    """Returns the list that Transformers would make for one row alone, the prompt keeping its number.

    Args:
        model, config, given, input_ids, mask: as in `processors_of`, the config for one answer a prompt.
        row: which one.
        answers: rows of each prompt.
    """
    ids, users = input_ids[row : row + 1], given.processors or ()
    return model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=input_ids.shape[1],
        encoder_input_ids=ids,
        prefix_allowed_tokens_fn=None if given.allowed is None else partial(_numbered, given.allowed, row // answers),
        logits_processor=LogitsProcessorList(own_processor(p, row, alone=len(input_ids) == 1) for p in users),
        device=input_ids.device,
        model_kwargs={} if mask is None else {"attention_mask": mask[row : row + 1]},
    )


def own_processor(processor: Any, row: int, alone: bool = False) -> Any:
    """Returns a user's processor for one row: from its factory, or a copy, so that a state is not shared by requests.

    Models and tokenizers that it holds are shared. Where a row is alone the processor is taken as it is.

    Raises:
        ValueError, TypeError: several rows, and a processor that needs to know which, or that cannot be copied.
    """
    if isinstance(processor, PerRequest):
        return processor.of(row)
    if alone:
        return processor
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        raise ValueError("PrefixConstrainedLogitsProcessor asks by row: pass prefix_allowed_tokens_fn=... instead")
    held = getattr(processor, "__dict__", {}).values()
    shared = {id(thing): thing for thing in held if isinstance(thing, (nn.Module, PreTrainedTokenizerBase))}
    try:
        return copy.deepcopy(processor, shared)
    except (TypeError, RuntimeError, NotImplementedError, pickle.PicklingError) as error:
        raise TypeError(
            f"logits_processor {type(processor).__name__} cannot be copied for each request ({error}): pass "
            f"hf_dcut.PerRequest(lambda row: ...), which makes a new one"
        ) from error


def _numbered(allowed: AllowedTokens, prompt: int, _: int, ids: Tensor) -> list[int]:
    """Returns the tokens allowed next, asked with the prompt's number in the batch instead of in the list's own, 0."""
    return allowed(prompt, ids)
