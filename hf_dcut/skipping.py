"""Whether the next step drafts at all: speculation must never be much slower than plain decoding.

Confidences exist only once the draft has been paid for, so this decision rests on history. The rule keeps a balance of
plain steps: a drafted step adds those that its tokens would have taken, and takes those that would have fitted into its
seconds. It may go below zero by a credit, since drafts must be seen to be judged: a step and a half, less where many
requests are a good sample in few steps. A loss beyond the credit is paid for by a pause instead: so many plain steps
that it is 3 % of them, and at least twice as many as last time, up to 32. Then a drafted step shows whether it pays
again.

A call begins where the last one of the same model and drafter ended, in this process: one unlucky step of a drafter
that has served well stops nothing, and one that never pays is not given its credit call after call.

So at any time, by the cost table, drafting has lost at most the credit, what earlier calls earned, 3 % of the plain
steps, and the last loss. The rule looks at the table and at counts, not at a clock: processes that hold one model
decide alike. A token counts the same whoever gets it, so the rule does not see that a batch which is not refilled ends
with its slowest request.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from hf_dcut.cost_table import CostTable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_dcut.drafters.base import Drafter

# The credit of one request in plain steps, and of how many requests together; no batch has less than the last.
_CREDIT, _SHARED_CREDIT, _LEAST_CREDIT = 1.5, 4.0, 0.15
# Credits that a good time can earn on top: enough for bad luck, little enough to notice that it is over.
_EARNED = 2.0
# What a loss may be of the pause that pays for it.
_LOSS = 0.03
# Plain steps up to which pauses double.
_LONGEST_PAUSE = 32


# Where the last call of each model ended, by its drafter, in credits.
_ended: WeakKeyDictionary[PreTrainedModel, dict[str, float]] = WeakKeyDictionary()


class SkipRule:
    """What drafted steps have gained over plain ones, and the pauses for what they lost.

    Args:
        costs: seconds of both kinds of steps.
        balance: to begin with, in credits: from -1, where none is left, to 2.
    """

    def __init__(self, costs: CostTable, balance: float = 0.0):
        self.costs = costs
        self.balance = balance
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
        credit = max(_LEAST_CREDIT, min(_CREDIT, _SHARED_CREDIT / requests))
        gain = committed / requests - drafted / plain
        if gain < 0 and self.balance + gain / credit < -1:
            self._left = self._pause = max(math.ceil(-gain / _LOSS), min(_LONGEST_PAUSE, 2 * self._pause))
        else:
            self.balance = min(_EARNED, self.balance + gain / credit)
            self._pause = 0


def last_balance(model: PreTrainedModel, drafter: Drafter) -> float:
    """Returns the balance, in credits, with which the last call of this model and such a drafter ended; else 0."""
    return _ended.get(model, {}).get(_kind(drafter), 0.0)


def keep_balance(model: PreTrainedModel, drafter: Drafter, balance: float) -> None:
    """Keeps the balance of a call that ends for the next one."""
    _ended.setdefault(model, {})[_kind(drafter)] = balance


def forget() -> None:
    """Lets the next call of every model begin without a balance."""
    _ended.clear()


def _kind(drafter: Drafter) -> str:
    return json.dumps(drafter.fingerprint(), sort_keys=True, default=str)
