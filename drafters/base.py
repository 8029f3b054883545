"""What a drafter is: something that is bound to a target for one call and then proposes, step after step.

A `Drafter` is shared: it may serve several calls and threads at once, and never changes unless it `remembers` what was
generated. What depends on the running requests (its K/V, its token history) lives in the `BoundDrafter` that `bind`
returns and dies with the call. No copy of target weights outlives the call either, since weights may change between
calls (reinforcement learning does that).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from hf_dcut.types import Batch, Committed, Drafts


class Drafter(ABC):
    """Base of all drafters.

    Attributes:
        draft_tokens: D, how many tokens are proposed a step.
        independent: whether each place's distribution is the same whatever is drawn at the others, as in a block
            drafter that fills all masks at once. Only then can drafts be sampled and still be cut in the same step.
        branches: whether `propose_tree` offers more than the chain of `propose`.
        remembers: whether it drafts from what earlier calls generated, so that a second one is faster than the first.
        taps: target layers (0-based decoder layer indices) whose output `observe` wants, in the order of the columns.
        networks: modules of its own, whose linear layers are prepacked on a CPU.
        layers: decoder layers of its own, if it has any: `DCutConfig(compile=True)` compiles their norms and MLPs.
    """

    draft_tokens: int
    independent: bool = False
    branches: bool = False
    remembers: bool = False
    taps: tuple[int, ...] = ()
    networks: Iterable[nn.Module] = ()
    layers: Iterable[nn.Module] = ()

    @abstractmethod
    def check(self, target: PreTrainedModel) -> None:
        """Raises ValueError when the drafter does not fit the target model, naming what differs and what to do."""

    @abstractmethod
    def bind(self, target: PreTrainedModel, slots: int, length: int) -> BoundDrafter:
        """Returns a drafter with its own state for `slots` requests of up to `length` cells each.

        Args:
            target: the Transformers model that verifies.
            slots: how many requests can be live at once.
            length: cells of a slot; the longest request plus `draft_tokens`.
        """

    @abstractmethod
    def cell_bytes(self, target: PreTrainedModel) -> int:
        """Returns the bytes of state that one cell of one slot takes, so that memory can be told beforehand."""

    def __repr__(self) -> str:
        return type(self).__name__

    @abstractmethod
    def fingerprint(self) -> dict[str, object]:
        """Returns what the seconds of a draft depend on, JSON-able: kind, shape, dtype."""


class BoundDrafter(ABC):
    """A drafter while it serves one call. Slots are numbered as the target's.

    Attributes:
        capturable: whether a CUDA graph can hold `observe`, and `propose` for a batch with a `reach`: they read nothing
            on the host and make tensors of the same shapes each time. Then `observe` is given rejected rows too, which
            lie in cells behind their request's and must not be looked at.
    """

    capturable: bool = False

    @abstractmethod
    def observe(self, committed: Committed) -> None:
        """Takes in the rows that became part of their requests: prompt tokens, then anchors and accepted drafts."""

    @abstractmethod
    def propose(self, batch: Batch) -> Drafts:
        """Returns up to D drafts for each request of the batch, after its anchor."""

    def propose_tree(self, batch: Batch, nodes: int) -> Drafts:
        """Returns up to so many nodes for each request of the batch, a tree of what may follow its anchor."""
        return self.propose(batch)

    def propose_logits(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Returns logits [B, D, C] of each draft place and the C token ids they are of, None for the whole vocabulary.

        Only drafters that are `independent` have it.
        """
        raise TypeError(f"{type(self).__name__} cannot be sampled from")

    @abstractmethod
    def move(self, source: int, destination: int) -> None:
        """Moves a request's state to another slot, whose old state is dropped."""

    @abstractmethod
    def copy(self, source: int, destination: int, length: int) -> None:
        """Gives a slot, which holds no request yet, what another has of its first `length` cells."""

    @abstractmethod
    def free(self, slot: int) -> None:
        """Forgets the state of a slot, so that another request can use it."""


def token_history(tokens: Tensor, committed: Committed) -> None:
    """Writes committed tokens into a history `tokens` int64 [slots, length] at their slot and cell."""
    tokens[committed.slot, committed.cell] = committed.token
