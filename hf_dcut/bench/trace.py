"""`Trace`: what a drafter would say at every position of an answer, and how much of it is right.

A greedy answer, or one drawn with its own seed, does not depend on how drafts are cut, and a drafter sees committed
tokens only. So the drafts at a position are the same on whatever steps it is reached, and one recording at every
position replays any way to cut, exactly. Recording at the steps of a real run would not: another cut starts its drafts
at other positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dcut.assembly import open_engine
from hf_dcut.config import DCutConfig
from hf_dcut.drafters.base import Drafter
from hf_dcut.drafters.wrapping import Wrapped
from hf_dcut.requests import Request
from hf_dcut.types import Batch, Drafts

# A share of the positions this small keeps no draft at all: every step drafts, and commits one token a request.
_NOTHING = 1e-9


@dataclass(frozen=True)
class Trace:
    """One request.

    Attributes:
        prompt_tokens: P.
        max_new_tokens: that it could have generated.
        tokens: n, that it did.
        confidence: float32 [n-1, D], of the drafts after the answer's first 1, 2, .. n-1 tokens; 0 where there is none.
        offered: int64 [n-1], how many drafts there are.
        accepted: int64 [n-1], how many of them the target agrees with.
    """

    prompt_tokens: int
    max_new_tokens: int
    tokens: int
    confidence: Tensor
    offered: Tensor
    accepted: Tensor

    @property
    def depth(self) -> int:
        """D."""
        return self.confidence.shape[1]

    def visited(self) -> list[int]:
        """Returns the positions, from 0, at which steps that verify every draft begin."""
        found, position, accepted = [], 0, self.accepted.tolist()
        while position < len(accepted):
            found.append(position)
            position += accepted[position] + 1
        return found

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-able values; confidences with four digits."""
        rows = zip(self.confidence.tolist(), self.offered.tolist(), strict=True)
        return {
            "prompt_tokens": self.prompt_tokens,
            "max_new_tokens": self.max_new_tokens,
            "tokens": self.tokens,
            "depth": self.depth,
            "confidence": [[round(c, 4) for c in row[:count]] for row, count in rows],
            "accepted": self.accepted.tolist(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Trace:
        """Returns the trace that `to_dict` wrote."""
        rows, depth = values["confidence"], values["depth"]
        confidence = torch.tensor([row + [0.0] * (depth - len(row)) for row in rows]).view(len(rows), depth)
        return cls(
            values["prompt_tokens"],
            values["max_new_tokens"],
            values["tokens"],
            confidence,
            torch.tensor([len(row) for row in rows], dtype=torch.int64),
            torch.tensor(values["accepted"], dtype=torch.int64),
        )


def record(
    model: PreTrainedModel,
    drafter: Drafter,
    requests: Sequence[Request],
    slots: int,
    draft_tokens: int | None = None,
    progress: Callable[[], object] = lambda: None,
) -> list[Trace]:
    """Returns the trace of each request, by running them with every draft made and none verified.

    Args:
        model: the target.
        drafter: who proposes.
        requests: fresh ones, each with its own seed.
        slots: how many run at once.
        draft_tokens: D; the drafter's own when None.
        progress: called after each request.

    Raises:
        ValueError: requests that share seeds.
    """
    by_seed = {request.seed: request for request in requests}
    if len(by_seed) != len(requests):
        raise ValueError("requests share seeds, by which they are known here: give each its own")
    # By seed and number of tokens generated: the drafts and their confidences.
    said: dict[tuple[int, int], tuple[list[int], list[float]]] = {}

    def keep(drafts: Drafts, batch: Batch) -> Drafts:
        columns = (batch.seed, batch.length, drafts.count, drafts.token, drafts.confidence)
        for seed, length, count, token, confidence in zip(*(x.tolist() for x in columns), strict=True):
            said[seed, length - len(by_seed[seed].prompt) + 1] = token[:count], confidence[:count]
        return drafts

    config = DCutConfig(budget=_NOTHING, draft_tree=False, draft_tokens=draft_tokens)
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    prompt = max(len(request.prompt) for request in requests)
    with open_engine(model, Wrapped(drafter, keep), config, slots, prompt, longest) as engine:
        for _ in engine.run(requests):
            progress()
        depth = engine.depth
    return [_trace(request, said, depth) for request in requests]


def _trace(request: Request, said: dict[tuple[int, int], tuple[list[int], list[float]]], depth: int) -> Trace:
    """Returns a finished request's trace.

    Args:
        request: with its answer.
        said: drafts and confidences by seed and number of tokens before them.
        depth: D.
    """
    steps = len(request.tokens) - 1
    confidence = torch.zeros(steps, depth)
    offered, accepted = torch.zeros(steps, dtype=torch.int64), torch.zeros(steps, dtype=torch.int64)
    for row in range(steps):
        # None where no request had room left for drafts.
        drafts, sure = (x[:depth] for x in said.get((request.seed, row + 1), ([], [])))
        offered[row] = len(drafts)
        confidence[row, : len(drafts)] = torch.tensor(sure)
        agreed = [a == b for a, b in zip(drafts, request.tokens[row + 1 :], strict=False)]
        accepted[row] = agreed.index(False) if False in agreed else len(agreed)
    return Trace(len(request.prompt), request.max_new_tokens, steps + 1, confidence, offered, accepted)
