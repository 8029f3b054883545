"""`Pulse`: how fast the machine is at the moment, by one piece of work that never changes.

A shared machine's speed drifts by a third within minutes. Ratios within a round do not see that, but seconds of two
cells can only be compared if it is known.
"""

from __future__ import annotations

import statistics
import time

import torch
from transformers import PreTrainedModel

# About what a step of few requests verifies.
_TOKENS = 16
_EVERY = 1.0


class Pulse:
    """The seconds of a forward of a few tokens through the model, taken about once a second.

    Args:
        model: the target, with its weights as the steps beside it find them.
    """

    def __init__(self, model: PreTrainedModel):
        self._model, self._tokens = model, torch.ones(1, _TOKENS, dtype=torch.int64, device=model.device)
        self._beats: list[float] = []
        self._last = -float("inf")

    @torch.no_grad()
    def beat(self) -> None:
        """Takes it, if the last time is long enough ago."""
        begin = time.perf_counter()
        if begin < self._last + _EVERY:
            return
        self._model(input_ids=self._tokens, use_cache=False)
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        self._last = time.perf_counter()
        self._beats.append(self._last - begin)

    @property
    def seconds(self) -> float | None:
        """The median so far; None before the first beat."""
        return statistics.median(self._beats) if self._beats else None
