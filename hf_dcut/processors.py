"""Each request's own processors and criteria, made from the lists that Transformers prepared for the whole batch.

What keeps no state is shared by all requests. What may keep one, or counts requests by row, is made for each request
alone, which calls it with one row, its own: from a factory (`PerRequest`), or as a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PrefixConstrainedLogitsProcessor,
    StopStringCriteria,
)

from hf_dcut.tiers import for_batch, is_known, of_rows

# Criteria of Transformers that keep no state.
_STATELESS = {MaxTimeCriteria, StopStringCriteria}


class PerRequest(LogitsProcessor):
    """A processor or stopping criterion with a state, one instance a request: a grammar, say. For plain `generate` too.

    Args:
        factory: called with a request's row in the batch, returns what that request is to have. That one is called once
            for every committed token, in order: a processor with ids int64 [1, n] and scores float32 [1, V] before the
            token is chosen, a criterion behind it, with ids that end in it and the recorded scores.
    """

    def __init__(self, factory: Callable[[int], Any]):
        self.factory = factory
        self._rows: dict[int, Any] = {}

    def of(self, row: int) -> Any:
        """Returns a new processor or criterion for a row."""
        return self.factory(row)

    def __call__(self, input_ids: Tensor, scores: Any) -> Tensor:
        """Returns processed scores float32 [B, V], or which rows end, bool [B]: for all rows, as plain `generate` asks.

        Use a fresh `PerRequest` for every plain `generate`, since what the rows have stays in it.

        Args:
            input_ids: int64 [B, n].
            scores: float32 [B, V] of a processor; of a criterion those recorded, one such tensor a token, or None.
        """
        rows = range(len(input_ids))
        self._rows |= {row: self.of(row) for row in rows if row not in self._rows}
        ids = input_ids.split(1)
        if isinstance(scores, Tensor):
            return torch.cat([self._rows[row](ids[row], scores[row : row + 1]) for row in rows])
        recorded = [None if scores is None else tuple(each[row : row + 1] for each in scores) for row in rows]
        met = [torch.as_tensor(self._rows[row](ids[row], recorded[row])).any() for row in rows]
        return torch.stack(met).to(input_ids.device)


def processors_of(prepared: LogitsProcessorList, rows: int) -> tuple[LogitsProcessorList, list[LogitsProcessorList]]:
    """Returns what all B requests share, called for all rows at once, and what comes after it for each, to be walked.

    Args:
        prepared: what Transformers made for the whole batch.
        rows: B.

    Raises:
        ValueError, TypeError: a processor holds too many or too few prompts, or cannot be copied.
    """
    shared = list(takewhile(is_known, prepared))
    walked = [[_own(p, row, rows, "logits_processor") for p in prepared[len(shared) :]] for row in range(rows)]
    return LogitsProcessorList(for_batch(p, rows) for p in shared), [LogitsProcessorList(own) for own in walked]


def criteria_of(prepared: StoppingCriteriaList, rows: int) -> tuple[list[StoppingCriteriaList], frozenset[int], int]:
    """Returns what each of B requests asks after a token, the end tokens, and the longest width, prompts and pads too.

    Args:
        prepared: what Transformers made for the whole batch.
        rows: B.

    Raises:
        TypeError: a criterion cannot be copied.
    """
    asked = [c for c in prepared if not isinstance(c, (EosTokenCriteria, MaxLengthCriteria))]
    ends = [c.eos_token_id.flatten().tolist() for c in prepared if isinstance(c, EosTokenCriteria)]
    widths = [c.max_length for c in prepared if isinstance(c, MaxLengthCriteria)]
    own = [StoppingCriteriaList(_own(c, row, rows, "stopping_criteria") for c in asked) for row in range(rows)]
    return own, frozenset(token for ids in ends for token in ids), min(widths)


def own_copies(given: Iterable[Any], row: int, argument: str, alone: bool = False) -> list[Any]:
    """Returns processors or criteria for one request, as they are where it is the only one that has them.

    Raises:
        TypeError: one cannot be copied.
    """
    return [g if alone and not isinstance(g, PerRequest) else _own_copy(g, row, argument) for g in given]


def _own(given: Any, row: int, rows: int, argument: str) -> Any:
    """Returns a processor or criterion of a batch of B rows for one of them."""
    if is_known(given):
        return of_rows(for_batch(given, rows), [row])
    if isinstance(given, PrefixConstrainedLogitsProcessor):
        return _of_prompt(given, row)
    return own_copies([given], row, argument, alone=rows == 1)[0]


def _own_copy(given: Any, row: int, argument: str) -> Any:
    """Returns a processor or criterion for one request: the same if it keeps no state, from its factory, or a copy.

    Models and tokenizers that it holds are shared.
    """
    if isinstance(given, PerRequest):
        return given.of(row)
    if is_known(given) or type(given) in _STATELESS:
        return given
    held = getattr(given, "__dict__", {}).values()
    shared = {id(thing): thing for thing in held if isinstance(thing, (nn.Module, PreTrainedTokenizerBase))}
    try:
        return copy.deepcopy(given, shared)
    except (TypeError, RuntimeError) as error:
        # What Python, and what torch and C++ extensions raise for an object without a way to copy it.
        raise TypeError(
            f"{argument} {type(given).__name__} cannot be copied for each request ({error}): pass "
            f"hf_dcut.PerRequest(lambda row: ...), which makes a new one"
        ) from error


def _of_prompt(constrained: PrefixConstrainedLogitsProcessor, row: int) -> PrefixConstrainedLogitsProcessor:
    """Returns the processor for one row: it asks with the number of the row's prompt, instead of always with 0."""
    allowed, own = constrained._prefix_allowed_tokens_fn, copy.copy(constrained)
    own._prefix_allowed_tokens_fn, own._num_beams = partial(_asked_by, allowed, row // constrained._num_beams), 1
    return own


def _asked_by(allowed: Callable[[int, Tensor], list[int]], prompt: int, _: int, ids: Tensor) -> list[int]:
    return allowed(prompt, ids)
