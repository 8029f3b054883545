"""`Request`: one sequence that is being generated, with its own options, seed and totals.

Together with the caches the only mutable state. Its progress is kept in host numbers, so that a step can be planned
without asking the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hf_dcut.text import Text
from hf_dcut.types import Batch

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    from hf_dcut.media import Media

# What the code of a user's processors and criteria raises when something is wrong with one request. Interrupts, a full
# memory and a broken machine are not among them.
OWN_FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(slots=True)
class Totals:
    """What a request's decoding steps came to.

    Attributes:
        steps: decoding steps it took part in.
        kept, accepted: drafts verified, and committed.
    """

    steps: int = 0
    kept: int = 0
    accepted: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """One sequence.

    Attributes:
        id: number of the request; rows of `generate` count from 0.
        prompt: token ids, without padding.
        max_new_tokens: most tokens to generate.
        eos: ids that end the request.
        seed: key of its random numbers.
        left_pads: pads that stood before the prompt in the user's batch; processors count in padded width.
        rope: what is added to a cell to get its position (images shift it; 0 for text).
        media: what the prompt holds besides text.
        generation_config: the request's own options.
        pad: id that stood in the left padding.
        samples: whether tokens are drawn; else the likeliest is taken.
        processors: applied to the logits before that, all rows at once, by requests that share the list (`tiers.py`).
        row: which row of their batch those processors take the request for.
        walked: applied after them, for this request alone, one row after the other: grammars and the like.
        criteria: what else than an end token or the length ends the request.
        keeps_scores, keeps_logits: whether `scores`, `logits` are kept, float32 [1, V] a generated token.
        keeps_logprobs: whether `logprobs` are kept.
        listener: called with the tokens of each step, and whether they end the request.
        priority: who waits with a higher one is admitted first.
        name: its key in a batch job.
        created, admitted: when it was made and when it first got a slot, by `time.perf_counter`.
        isolated: whether what its processors and criteria raise ends this request alone, and not the call.
        slot: where its K/V are; -1 while it waits.
        arrival: its number among those who ever waited.
        read: tokens read so far whose K/V are stored: of the prompt, then of those to be resumed.
        resumed: generated tokens that are read again after the prompt, since the request lost its slot.
        tokens: what was generated.
        logprobs: of each token, the log-probability it was chosen with: under the processed scores.
        finish_reason: "eos", "length", "stop" (a criterion), "cancelled" or "error"; None while it runs.
        error: what ended it, if that was an error.
        totals: of its decoding steps.
    """

    id: int
    prompt: list[int]
    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    seed: int = 0
    left_pads: int = 0
    rope: int = 0
    media: Media | None = None
    generation_config: GenerationConfig | None = None
    pad: int = 0
    samples: bool = False
    processors: LogitsProcessorList | None = None
    row: int = 0
    walked: LogitsProcessorList | None = None
    criteria: StoppingCriteriaList | None = None
    keeps_scores: bool = False
    keeps_logits: bool = False
    keeps_logprobs: bool = False
    listener: Callable[[Sequence[int], bool], None] | None = None
    priority: int = 0
    name: str = ""
    created: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    isolated: bool = False
    slot: int = -1
    arrival: int = -1
    read: int = 0
    resumed: int = 0
    tokens: list[int] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    error: Exception | None = None
    totals: Totals = field(default_factory=Totals)
    _text: Text | None = field(default=None, init=False, repr=False)
    # Tokens that criteria were asked about, and whether the last one met one.
    _asked: int = field(default=0, init=False, repr=False)
    _stop: bool = field(default=False, init=False, repr=False)

    @property
    def unread(self) -> list[int]:
        """Tokens to be read before the request decodes: the rest of the prompt, and of what it had generated."""
        return (self.prompt + self.tokens[: self.resumed])[self.read :]

    @property
    def decoding(self) -> bool:
        """Whether everything is read, so that the request goes on from its last token."""
        return self.read == len(self.prompt) + self.resumed

    @property
    def length(self) -> int:
        """Cells of the slot in use. The last generated token, the anchor, has none yet."""
        return self.read + max(0, len(self.tokens) - 1 - self.resumed)

    @property
    def reach(self) -> int:
        """Tokens of the prompt and of the longest answer."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def left(self) -> int:
        """Tokens that it can still get."""
        return self.max_new_tokens - len(self.tokens)

    @property
    def room(self) -> int:
        """Drafts that could still be committed: a step commits its drafts and one token more."""
        return self.left - 1

    def text(self, device: torch.device, ahead: Sequence[int] = ()) -> Tensor:
        """Returns what processors and criteria of plain `generate` would see: padding, prompt, tokens, int64 [1, n].

        Args:
            device: of the scores.
            ahead: tokens behind those so far, chosen already.
        """
        if self._text is None:
            self._text = Text([self.pad] * self.left_pads + self.prompt, self.max_new_tokens, device)
        return self._text.show(self.tokens, ahead)

    def ending(self, ahead: Sequence[int], scores: Tensor) -> str | None:
        """Returns why the request ends with the last of the tokens ahead; None if it goes on behind it.

        Criteria are asked once about each token, as in `generate`: by a walk, which must not pass the end, or `append`.

        Args:
            ahead: tokens behind those so far, in none but the last of which the request ends.
            scores: float32 [n, V], processed scores each of them was chosen by, if they are kept.
        """
        stopped = bool(self.criteria) and self._stopped(ahead, scores)
        if ahead[-1] in self.eos:
            return "eos"
        if len(self.tokens) + len(ahead) >= self.max_new_tokens:
            return "length"
        return "stop" if stopped else None

    def _stopped(self, ahead: Sequence[int], scores: Tensor) -> bool:
        """Returns whether a criterion is met by the last token ahead, given what plain `generate` gives it."""
        assert self.criteria is not None
        count = len(self.tokens) + len(ahead)
        if count > self._asked:
            shown = (*self.scores, *scores[: len(ahead), None].unbind()) if self.keeps_scores else None
            with self.own_faults():
                met = self.criteria(self.text(scores.device, ahead), shown)
                self._asked, self._stop = count, bool(torch.as_tensor(met).any())
        return self._stop and count == self._asked

    def lose_slot(self) -> None:
        """Forgets what is stored; the prompt and all tokens but the anchor will be read again."""
        self.slot, self.read, self.resumed = -1, 0, max(0, len(self.tokens) - 1)

    @contextmanager
    def own_faults(self) -> Iterator[None]:
        """Around code of the request's own: what it raises ends an isolated request, and the others go on."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except OWN_FAULTS as error:
            if not self.isolated:
                raise
            self.finish_reason, self.error = "error", error

    def append(self, tokens: Sequence[int], scores: Tensor, logprobs: Sequence[float] = ()) -> int:
        """Takes new tokens up to and with the first that ends the request; returns how many that were.

        Args:
            tokens: what was chosen, in order.
            scores: float32 [n, V], processed scores each was chosen by, if they are kept.
            logprobs: of each, if they are kept.
        """
        count = 0
        while count < len(tokens) and not self.finish_reason:
            count += 1
            reason = self.ending(tokens[:count], scores)
            self.finish_reason = self.finish_reason or reason
        self.tokens += tokens[:count]
        if self.keeps_scores:
            # A copy, so that the scores of rejected rows do not stay in memory behind it.
            self.scores += scores[:count, None].clone().unbind()
        if self.keeps_logprobs:
            self.logprobs += logprobs[:count]
        return count

    def tell(self, count: int) -> None:
        """Hands the last so many tokens to whoever listens."""
        if self.listener is not None and count:
            self.listener(self.tokens[-count:], self.finish_reason is not None)


def batch_of(requests: Sequence[Request], device: torch.device | str) -> Batch:
    """Returns where the decoding requests stand, in their order."""
    return Batch(*table_of(requests, len(requests)).to(device))


def table_of(requests: Sequence[Request], rows: int) -> Tensor:
    """Returns the columns of a `Batch`, int64 [6, rows]: spare rows are empty requests, each in a slot of its own.

    Args:
        requests: those that decode; they lie in slots 0, 1, ..
        rows: B, at least as many.
    """
    spare = [(slot, 0, 0, 0, 0, 0) for slot in range(len(requests), rows)]
    columns = [(r.slot, r.length, r.tokens[-1], r.room, r.seed, r.rope) for r in requests] + spare
    return torch.tensor(columns, dtype=torch.int64).view(rows, 6).T.contiguous()
