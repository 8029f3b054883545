"""`BestOf`: several drafters at once; each step and request takes the drafts of the one that promises most.

A block drafter knows what its target tends to say, prompt lookup what this text has said before. Which of them is right
changes from token to token, and both tell how sure they are: the sum of the survivals of a request's drafts is how many
tokens they are expected to bring (the paper's objective, for one request with everything verified). The budget then
ranks what was taken as if it came from one drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dcut.drafters.base import BoundDrafter, Drafter
from hf_dcut.drafters.trees import merge
from hf_dcut.kernels import survivals
from hf_dcut.types import Batch, Committed, Drafts
from hf_dcut.wording import counted


class BestOf(Drafter):
    """Several drafters. Where trees are verified, all their drafts compete for a place in one.

    Args:
        drafters: two or more; where two promise the same, the earlier one is taken.

    Raises:
        ValueError: fewer than two.
        TypeError: one that is no drafter.
    """

    def __init__(self, drafters: Sequence[Drafter]):
        if len(drafters) < 2:
            raise ValueError(f"BestOf got {counted(len(drafters), 'drafter')}: give two or more")
        for drafter in drafters:
            if not isinstance(drafter, Drafter):
                raise TypeError(
                    f"BestOf got a {type(drafter).__name__}, which cannot draft: give drafters, such as "
                    f"hf_dcut.AutoDrafter.from_pretrained(folder_or_hub_id)"
                )
        self.drafters = tuple(drafters)
        self.branches = True
        self.remembers = any(drafter.remembers for drafter in drafters)
        self.draft_tokens = max(drafter.draft_tokens for drafter in drafters)
        self.taps = tuple(tap for drafter in drafters for tap in drafter.taps)
        self.networks = [network for drafter in drafters for network in drafter.networks]
        self.layers = [layer for drafter in drafters for layer in drafter.layers]

    def check(self, target: PreTrainedModel) -> None:
        """Raises what the first drafter that does not fit the target raises."""
        for drafter in self.drafters:
            drafter.check(target)

    def bind(self, target: PreTrainedModel, slots: int, length: int) -> BoundBestOf:
        shares = [len(drafter.taps) for drafter in self.drafters]
        return BoundBestOf([drafter.bind(target, slots, length) for drafter in self.drafters], shares)

    def cell_bytes(self, target: PreTrainedModel) -> int:
        return sum(drafter.cell_bytes(target) for drafter in self.drafters)

    def __repr__(self) -> str:
        return f"BestOf({', '.join(map(repr, self.drafters))})"

    def fingerprint(self) -> dict[str, object]:
        return {"kind": "best of", "drafters": [drafter.fingerprint() for drafter in self.drafters]}


class BoundBestOf(BoundDrafter):
    """The same while it serves a call.

    Args:
        drafters: bound ones.
        taps: how many tapped layers each of them reads, of those that stand side by side.
    """

    def __init__(self, drafters: Sequence[BoundDrafter], taps: Sequence[int]):
        self.drafters, self.taps = drafters, taps
        self.capturable = all(drafter.capturable for drafter in drafters)

    def observe(self, committed: Committed) -> None:
        for drafter, taps in zip(self.drafters, self._taps_of(committed.taps), strict=True):
            drafter.observe(replace(committed, taps=taps))

    def propose(self, batch: Batch) -> Drafts:
        """Returns of each request the drafts that promise most tokens."""
        offers = [drafter.propose(batch) for drafter in self.drafters]
        best = torch.stack([promise(drafts) for drafts in offers]).argmax(0)
        depth = max(drafts.token.shape[1] for drafts in offers)
        token, confidence = (
            torch.stack([_widened(getattr(drafts, name), depth) for drafts in offers])
            for name in ("token", "confidence")
        )
        count = torch.stack([drafts.count for drafts in offers])
        rows = torch.arange(len(batch), device=best.device)
        return Drafts.chain(token[best, rows], confidence[best, rows], count[best, rows])

    def propose_tree(self, batch: Batch, nodes: int) -> Drafts:
        """Returns the likeliest nodes of all drafters' trees."""
        return merge([drafter.propose_tree(batch, nodes) for drafter in self.drafters], nodes)

    def move(self, source: int, destination: int) -> None:
        for drafter in self.drafters:
            drafter.move(source, destination)

    def copy(self, source: int, destination: int, length: int) -> None:
        for drafter in self.drafters:
            drafter.copy(source, destination, length)

    def free(self, slot: int) -> None:
        for drafter in self.drafters:
            drafter.free(slot)

    def _taps_of(self, taps: Tensor | None) -> Sequence[Tensor | None]:
        """Returns each drafter's own columns of the taps [T, F]; None for those that read none."""
        if taps is None:
            return [None] * len(self.drafters)
        width = taps.shape[1] // sum(self.taps)
        parts = taps.split([count * width for count in self.taps], dim=1)
        return [part if count else None for part, count in zip(parts, self.taps, strict=True)]


def promise(drafts: Drafts) -> Tensor:
    """Returns how many tokens each request's drafts are expected to bring, float32 [B]: the sum of their survivals."""
    place = torch.arange(drafts.token.shape[1], device=drafts.token.device)
    return survivals(drafts.confidence, place < drafts.count[:, None]).sum(1)


def _widened(values: Tensor, depth: int) -> Tensor:
    """Returns the values [B, N] of N places as [B, depth], with zeros behind them."""
    return torch.nn.functional.pad(values, (0, depth - values.shape[1]))
