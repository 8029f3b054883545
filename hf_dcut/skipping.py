"""Whether the next step drafts at all: speculation must never be much slower than plain decoding.

Confidences exist only once the draft has been paid for, so this decision rests on history. The rule keeps a balance of
plain steps: a drafted step adds those that it has saved, and takes those that would have fitted into its seconds. It
may go below zero by a credit, since drafts must be seen to be judged: a step and a half, less where many requests are a
good sample in few steps. A loss beyond the credit is paid for by a pause instead: so many plain steps that it is 3 % of
them, and at least twice as many as last time, up to 32. Then a drafted step shows whether it pays again.

A call begins where the last one of the same model and drafter ended, in this process: one unlucky step of a drafter
that has served well stops nothing, and one that never pays is not given its credit call after call.

What a step saves depends on who ends last. A plain step of B requests takes f + r B seconds. Any token saves its row's
r, whoever gets it; but f is saved only as often as the end of the last request comes nearer, waiting ones included. Of
that, three quarters count: who is last by bad luck makes up for some of it.

So at any time, counted like this by the cost table, drafting has lost at most the credit, what earlier calls earned,
3 % of the plain steps, and the last loss. The rule looks at the table and at counts, not at a clock: processes that
hold one model decide alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
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
# What counts of the delay by the last request.
_DELAY = 0.75
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

    @property
    def pausing(self) -> bool:
        """Whether the next step will not draft."""
        return self._left > 0

    def drafts_next(self) -> bool:
        """Returns whether the next step drafts; a step that does not counts towards the pause."""
        if self._left:
            self._left -= 1
            return False
        return True

    def observe(self, added: Sequence[int], total: int, kv_length: int, nearer: int | None = None) -> None:
        """Takes in a drafted step.

        Args:
            added: tokens that each of the B requests got.
            total: T, packed tokens of the step.
            kv_length: cells of the longest request.
            nearer: plain steps by which the last request's end came nearer; None if too many wait to tell.
        """
        requests = len(added)
        plain, drafted = self.costs.plain(requests, kv_length), self.costs.drafted(requests, total, kv_length)
        credit = max(_LEAST_CREDIT, min(_CREDIT, _SHARED_CREDIT / requests))
        gain = self.saved(added, kv_length, nearer) - drafted / plain
        if gain < 0 and self.balance + gain / credit < -1:
            self._left = self._pause = max(math.ceil(-gain / _LOSS), min(_LONGEST_PAUSE, 2 * self._pause))
        else:
            self.balance = min(_EARNED, self.balance + gain / credit)
            self._pause = 0

    def saved(self, added: Sequence[int], kv_length: int, nearer: int | None = None) -> float:
        """Returns how many plain steps of these requests need not be taken any more; a plain step itself saves one.

        Args:
            added, kv_length, nearer: as in `observe`.
        """
        mean = sum(added) / len(added)
        return mean if nearer is None else mean + _DELAY * self._fixed_share(len(added), kv_length) * (nearer - mean)

    def _fixed_share(self, requests: int, kv_length: int) -> float:
        """Returns the share f of a plain step's seconds that does not depend on the number of its rows."""
        if requests == 1:
            return 1.0
        one, all_of_them = self.costs.plain(1, kv_length), self.costs.plain(requests, kv_length)
        row = max(0.0, (all_of_them - one) / (requests - 1))
        return max(0.0, 1 - row * requests / all_of_them)


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
