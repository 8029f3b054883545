"""`Text`: the ids of one request as plain `generate` shows them to processors and criteria, kept in one buffer.

Those want a tensor of everything so far after every token. Plain `generate` makes a new one each time; here tokens are
written behind those that are there, and what is shown is a view: a token costs as much at the end of a long text as at
its beginning. What was shown stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Text:
    """Padding, prompt and new tokens of a request.

    Args:
        begin: ids before the first new token.
        room: most new tokens.
        device: where processors and criteria work.
    """

    def __init__(self, begin: Sequence[int], room: int, device: torch.device):
        self.begin = len(begin)
        self._ids = torch.empty(1, self.begin + room, dtype=torch.int64, device=device)
        self._ids[0, : self.begin] = torch.tensor(begin)
        self._written = 0

    def show(self, tokens: Sequence[int], ahead: Sequence[int] = ()) -> Tensor:
        """Returns the ids, int64 [1, n], up to these new tokens, after writing those that are not there yet.

        Args:
            tokens: all committed new tokens.
            ahead: tokens behind them that will be committed.
        """
        known = len(tokens)
        new = [*tokens[self._written :], *ahead[max(0, self._written - known) :]]
        if new:
            place = self.begin + self._written
            self._ids[0, place : place + len(new)] = torch.tensor(new)
            self._written += len(new)
        return self._ids[:, : self.begin + known + len(ahead)]
