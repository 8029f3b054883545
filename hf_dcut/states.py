"""`StateLayer`: what a Gated DeltaNet layer keeps of each slot, which is no row of cells but one state.

It stands for all tokens of a request so far and cannot be cut back to fewer. So no forward changes it: what a step put
through the layer is held until the step's verdict is there, and `commit` takes in the accepted tokens and no others.
For prompts, none of which is rejected, that is the state behind the piece that was read. Decoding requests go through
the rule a second time, all at once, from where they stood: rows past the accepted ones decay by exp(0) = 1 and write
with strength 0, which leaves a state as it is, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateShape:
    """What one slot of one layer holds, however long its request.

    Attributes:
        width: inputs of the convolution that it still sees: one less than its kernel.
        channels: of the convolution.
        heads, key_dim, value_dim: of the recurrent state.
        dtype: of the recurrent state, as the rule returns it: float32 for models of any dtype.
    """

    width: int
    channels: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype = torch.float32

    def slot_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Returns the bytes of a slot: its state counts twice, since a step holds the one before and the one after."""
        state = self.heads * self.key_dim * self.value_dim * self.dtype.itemsize
        return 2 * (self.width * self.channels * dtype.itemsize + state)


@dataclass(frozen=True, slots=True)
class Steps:
    """What R decoding requests put through a layer in one step, W rows each.

    Attributes:
        seen: [R, width + W, channels], inputs of the convolution, those kept from before first.
        key: [R, W, key heads, key dim].
        value: [R, W, heads, value dim].
        decay, beta: [R, W, heads], logarithm of what is left of the state, and how strongly a row writes into it.
        state: [R, heads, key dim, value dim] behind the row, where each has one; else None.
        rule: the recurrent form of the gated delta rule, which returns the last state too.
    """

    seen: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor
    state: Tensor | None
    rule: Callable[..., Any]

    def window(self, accepted: Tensor) -> Tensor:
        """Returns the last inputs [R, width, channels] of the convolution up to the anchor and the accepted drafts."""
        width = self.seen.shape[1] - self.key.shape[1]
        kept = accepted[:, None] + 1 + torch.arange(width, device=accepted.device)
        return self.seen.gather(1, kept[..., None].expand(-1, -1, self.seen.shape[2]))

    def replay(self, before: Tensor, accepted: Tensor, longest: int) -> Tensor:
        """Returns the states [R, heads, key dim, value dim] behind the anchor and the accepted drafts.

        Args:
            before: the states before the step.
            accepted: int64 [R].
            longest: the most rows that any request takes in.
        """
        if self.key.shape[1] == 1:
            assert self.state is not None
            return self.state
        live = (torch.arange(longest, device=accepted.device) <= accepted[:, None])[..., None]
        key, value, decay, beta = (x[:, :longest] for x in (self.key, self.value, self.decay, self.beta))
        _, state = self.rule(key, key, value, g=decay * live, beta=beta * live, initial_state=before)
        return state


class StateLayer:
    """The states of one layer, for all slots. A slot that nobody has used, or that was freed, holds the first state.

    Args:
        shape: of a slot.
        slots: requests that can be live at once.
        dtype, device: as the model's; the recurrent state has a dtype of its own.
    """

    def __init__(self, shape: StateShape, slots: int, dtype: torch.dtype, device: torch.device | str):
        self.shape = shape
        self.window = torch.zeros(slots, shape.width, shape.channels, dtype=dtype, device=device)
        size = (slots, shape.heads, shape.key_dim, shape.value_dim)
        self.state = torch.zeros(size, dtype=shape.dtype, device=device)
        self.steps: Steps | None = None
        self.pieces: list[tuple[int, Tensor, Tensor]] = []

    def begin(self) -> None:
        """Forgets what a forward left that was not committed."""
        self.steps, self.pieces = None, []

    def commit(self, accepted: Tensor, longest: int) -> None:
        """Takes in what the forward left: all of the prompts' pieces, the accepted rows of decoding requests.

        Args:
            accepted: int64 [R], drafts of the decoding requests, which lie in slots 0 .. R-1.
            longest: the most rows that any of them takes in.
        """
        for slot, window, state in self.pieces:
            self.window[slot], self.state[slot] = window, state
        if self.steps is not None:
            rows = slice(len(accepted))
            self.state[rows] = self.steps.replay(self.state[rows], accepted, longest)
            self.window[rows] = self.steps.window(accepted)
        self.begin()

    def move(self, source: int, destination: int) -> None:
        """Copies a slot's state over another slot's."""
        self.window[destination] = self.window[source]
        self.state[destination] = self.state[source]

    def copy(self, source: int, destination: int, length: int) -> None:
        """Does the same: a state stands for all cells in use, whatever `length` is, and for no fewer."""
        self.move(source, destination)

    def free(self, slot: int) -> None:
        """Puts a slot back to the first state, from which the next request goes on."""
        self.window[slot] = 0
        self.state[slot] = 0
