"""Whether the next step drafts at all: speculation must never be slower than plain decoding.

Confidences exist only once the draft has been paid for, so this decision rests on history: how many tokens drafted
steps committed for their seconds, against the plain step. While they fall short, drafting pauses for as many plain
steps as it takes for the last loss to be a twentieth of them, then for twice as many, up to 32, with one drafted step
in between to see whether it pays again. So an expensive failure is followed by a long pause, a near miss by a short
one.
"""

from __future__ import annotations

import math

from hf_dcut.cost_table import CostTable

_LONGEST_PAUSE = 32
# What a drafted step may lose, of the seconds of the plain steps behind it.
_LOSS = 0.05
# Verify rows that the running gain looks back on; a large batch is a good sample in few steps.
_MEMORY = 48
# Drafting starts on trust: it takes some evidence, not one unlucky step, to stop it.
_TRUST = 1.2


class SkipRule:
    """Running estimate of the speed of drafted steps relative to plain ones.

    Args:
        costs: seconds of both kinds of steps.
    """

    def __init__(self, costs: CostTable):
        self.costs = costs
        self.gain = _TRUST
        self._pause = self._left = 0

    def drafts_next(self) -> bool:
        """Returns whether the next step drafts; a step that does not counts towards the pause."""
        if self._left:
            self._left -= 1
            return False
        return True

    def observe(self, requests: int, total: int, committed: int, kv_length: int) -> None:
        """Takes in a drafted step of B requests and T packed tokens that committed so many tokens."""
        plain, drafted = self.costs.plain(requests, kv_length), self.costs.drafted(requests, total, kv_length)
        weight = min(0.5, requests / _MEMORY)
        self.gain += weight * (committed / requests * plain / drafted - self.gain)
        if self.gain < 1:
            loss = drafted / plain - committed / requests
            self._left = self._pause = min(_LONGEST_PAUSE, max(2 * self._pause, math.ceil(loss / _LOSS), 1))
        else:
            self._pause = 0
