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

from hf_dcut.types import Batch

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

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
        generation_config: the request's own options.
        pad: id that stood in the left padding.
        samples: whether tokens are drawn; else the likeliest is taken.
        processors: applied to the logits before that.
        walks: whether the processors look at ids or keep a state, so that rows must come one by one, in order.
        criteria: what else than an end token or the length ends the request.
        keeps_scores, keeps_logits: whether `scores`, `logits` are kept, float32 [V] a generated token.
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
    generation_config: GenerationConfig | None = None
    pad: int = 0
    samples: bool = False
    processors: LogitsProcessorList | None = None
    walks: bool = False
    criteria: StoppingCriteriaList | None = None
    keeps_scores: bool = False
    keeps_logits: bool = False
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
    finish_reason: str | None = None
    error: Exception | None = None
    totals: Totals = field(default_factory=Totals)

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
    def room(self) -> int:
        """Drafts that could still be committed: a step commits its drafts and one token more."""
        return self.max_new_tokens - len(self.tokens) - 1

    @property
    def padded_ids(self) -> list[int]:
        """What processors and criteria of plain `generate` would see: left padding, prompt and tokens so far."""
        return [self.pad] * self.left_pads + self.prompt + self.tokens

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

    def append(self, tokens: Sequence[int], scores: Tensor) -> int:
        """Takes new tokens up to and with the first that ends the request; returns how many that were.

        Args:
            tokens: what was chosen, in order.
            scores: float32 [n, V], processed scores each was chosen by, if they are kept.
        """
        for count, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            if self.keeps_scores:
                # A copy, so that the scores of rejected rows do not stay in memory behind it.
                self.scores.append(scores[count - 1].clone())
            if token in self.eos:
                self.finish_reason = "eos"
            elif len(self.tokens) == self.max_new_tokens:
                self.finish_reason = "length"
            elif self.criteria and self._stopped(scores.device):
                self.finish_reason = "stop"
            if self.finish_reason:
                return count
        return len(tokens)

    def _stopped(self, device: torch.device) -> bool:
        """Returns whether a criterion is met, asked once for each new token, with what plain `generate` gives it."""
        assert self.criteria is not None
        ids = torch.tensor([self.padded_ids], device=device)
        scores = tuple(row[None] for row in self.scores) if self.keeps_scores else None
        with self.own_faults():
            return bool(torch.as_tensor(self.criteria(ids, scores)).any())
        return False


def batch_of(requests: Sequence[Request], device: torch.device | str) -> Batch:
    """Returns where the decoding requests stand, in their order."""
    columns = [(r.slot, r.length, r.tokens[-1], r.room, r.seed, r.rope) for r in requests]
    table = torch.tensor(columns, dtype=torch.int64).view(len(columns), 6).T.contiguous().to(device)
    return Batch(*table)
