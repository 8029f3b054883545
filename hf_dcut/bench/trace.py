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
from hf_dcut.branching import ancestors_of, parents
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
        right: bool [n-1, D], drafts that the target agrees with, as it does with all before them.
        parent: int64 [n-1, D], the draft that each follows, as in `Drafts`; None for chains.
    """

    prompt_tokens: int
    max_new_tokens: int
    tokens: int
    confidence: Tensor
    offered: Tensor
    right: Tensor
    parent: Tensor | None = None

    @property
    def depth(self) -> int:
        """D; of trees, how many nodes one may have."""
        return self.confidence.shape[1]

    @property
    def accepted(self) -> Tensor:
        """How many drafts are accepted when all are verified, int64 [n-1]."""
        return self.right.sum(1)

    @property
    def place(self) -> Tensor:
        """How many drafts stand between each draft and the token they all follow, int64 [n-1, D]."""
        if self.parent is None:
            return torch.arange(self.depth).expand(self.confidence.shape)
        return ancestors_of(self.parent).sum(-1) - 1

    def visited(self) -> list[int]:
        """Returns the positions, from 0, at which steps that verify every draft begin."""
        found, position, accepted = [], 0, self.accepted.tolist()
        while position < len(accepted):
            found.append(position)
            position += accepted[position] + 1
        return found

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-able values; confidences with four digits."""
        offered = self.offered.tolist()
        rows = zip(self.confidence.tolist(), offered, strict=True)
        values = {
            "prompt_tokens": self.prompt_tokens,
            "max_new_tokens": self.max_new_tokens,
            "tokens": self.tokens,
            "depth": self.depth,
            "confidence": [[round(c, 4) for c in row[:count]] for row, count in rows],
        }
        if self.parent is None:
            return {**values, "accepted": self.accepted.tolist()}
        parents = [row[:count] for row, count in zip(self.parent.tolist(), offered, strict=True)]
        return {**values, "parent": parents, "right": [row.nonzero().flatten().tolist() for row in self.right]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Trace:
        """Returns the trace that `to_dict` wrote."""
        rows, depth = values["confidence"], values["depth"]
        right = torch.zeros(len(rows), depth, dtype=torch.bool)
        for row, nodes in enumerate(values["right"] if "right" in values else map(range, values["accepted"])):
            right[row, list(nodes)] = True
        return cls(
            values["prompt_tokens"],
            values["max_new_tokens"],
            values["tokens"],
            _padded(rows, depth, 0.0),
            torch.tensor([len(row) for row in rows], dtype=torch.int64),
            right,
            _padded(values["parent"], depth, -1) if "parent" in values else None,
        )


def _padded(rows: Sequence[Sequence[float]], width: int, filling: float) -> Tensor:
    """Returns the rows as a tensor [rows, width], of the filling's dtype."""
    filled = [[*row, *[filling] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.tensor(filling).dtype).view(len(rows), width)


@dataclass(frozen=True)
class _Said:
    """What a drafter said at one position: its drafts, how sure it is, and which each follows."""

    token: list[int]
    confidence: list[float]
    parent: list[int]


def record(
    model: PreTrainedModel,
    drafter: Drafter,
    requests: Sequence[Request],
    slots: int,
    draft_tokens: int | None = None,
    progress: Callable[[], object] = lambda: None,
    tree: bool = False,
) -> list[Trace]:
    """Returns the trace of each request, by running them with every draft made and none verified.

    Args:
        model: the target.
        drafter: who proposes.
        requests: fresh ones, each with its own seed.
        slots: how many run at once.
        draft_tokens: D, or nodes of a tree; the drafter's own when None.
        progress: called after each request.
        tree: whether drafts are trees.

    Raises:
        ValueError: requests that share seeds, or trees of a drafter that has none.
    """
    by_seed = {request.seed: request for request in requests}
    if len(by_seed) != len(requests):
        raise ValueError("requests share seeds, by which they are known here: give each its own")
    # By seed and number of tokens generated.
    said: dict[tuple[int, int], _Said] = {}

    def keep(drafts: Drafts, batch: Batch) -> Drafts:
        columns = (batch.seed, batch.length, drafts.count, drafts.token, drafts.confidence, parents(drafts))
        for seed, length, count, *lists in zip(*(x.tolist() for x in columns), strict=True):
            said[seed, length - len(by_seed[seed].prompt) + 1] = _Said(*(values[:count] for values in lists))
        return drafts

    config = DCutConfig(budget=_NOTHING, draft_tree=tree, draft_tokens=draft_tokens)
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    prompt = max(len(request.prompt) for request in requests)
    with open_engine(model, Wrapped(drafter, keep), config, slots, prompt, longest) as engine:
        for _ in engine.run(requests):
            progress()
        depth = engine.depth
    return [_trace(request, said, depth, tree) for request in requests]


def _trace(request: Request, said: dict[tuple[int, int], _Said], depth: int, tree: bool) -> Trace:
    """Returns a finished request's trace.

    Args:
        request: with its answer.
        said: drafts by seed and number of tokens before them.
        depth: D, or nodes of a tree.
        tree: whether drafts are trees.
    """
    steps = len(request.tokens) - 1
    confidence, right = torch.zeros(steps, depth), torch.zeros(steps, depth, dtype=torch.bool)
    offered, parent = torch.zeros(steps, dtype=torch.int64), torch.full((steps, depth), -1)
    nothing = _Said([], [], [])
    for row in range(steps):
        # Nothing where no request had room left for drafts.
        drafts = said.get((request.seed, row + 1), nothing)
        count = min(depth, len(drafts.token))
        offered[row] = count
        confidence[row, :count] = torch.tensor(drafts.confidence[:count])
        parent[row, :count] = torch.tensor(drafts.parent[:count], dtype=torch.int64)
        right[row, :count] = torch.tensor(_right(drafts, request.tokens[row + 1 :])[:count])
    length = len(request.prompt), request.max_new_tokens, steps + 1
    return Trace(*length, confidence, offered, right, parent if tree else None)


def _right(drafts: _Said, answer: Sequence[int]) -> list[bool]:
    """Returns which drafts are tokens of the answer's rest, as are all before them."""
    # How many tokens of the answer a right draft ends; -1 is what they all follow.
    end = {-1: 0}
    for number, (token, parent) in enumerate(zip(drafts.token, drafts.parent, strict=True)):
        if parent in end and answer[end[parent] : end[parent] + 1] == [token]:
            end[number] = end[parent] + 1
    return [number in end for number in range(len(drafts.token))]
