"""`Recipe`: the numbers of a training run, their defaults and checks."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """How a drafter is trained.

    Attributes:
        steps: optimizer steps; None for as many as the time allows.
        batch: rows of a step over all processes; a row is one answer with some of its anchors.
        anchors: most anchors of a row; each is a block to draft.
        learning_rate: its peak; it rises over the `warmup` share of the steps and falls in a cosine to `floor` of it.
        warmup, floor: shares in [0, 1].
        weight_decay, clip: of AdamW; largest norm of the gradient.
        decay: places after which the weight of a draft in the loss has fallen to 1/e; None takes half the block.
        soft: share of what is learned from the target's own probabilities; the rest is from its greedy tokens.
        precision: "bf16" multiplies matrices in bfloat16 with weights in float32; "no" changes nothing.
        seed: of the order of the data.
        save_every: steps between saved states.
        evaluate_every: steps between evaluations on the answers that are held out.
    """

    steps: int | None = 1000
    batch: int = 8
    anchors: int = 32
    learning_rate: float = 6e-4
    warmup: float = 0.04
    floor: float = 0.02
    weight_decay: float = 0.01
    clip: float = 1.0
    decay: float | None = None
    soft: float = 0.0
    precision: str = "bf16"
    seed: int = 0
    save_every: int = 100
    evaluate_every: int = 200

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "anchors", "save_every", "evaluate_every"):
            value = getattr(self, name)
            open_end = name == "steps" and value is None
            self._check(name, open_end or (type(value) is int and value > 0), "a positive integer")
        for name in ("learning_rate", "clip"):
            self._check(name, getattr(self, name) > 0, "a positive number")
        self._check("decay", self.decay is None or self.decay > 0, "a positive number or None")
        for name in ("warmup", "floor", "weight_decay", "soft"):
            self._check(name, 0 <= getattr(self, name) <= 1, "a number in [0, 1]")
        self._check("precision", self.precision in ("bf16", "no"), "'bf16' or 'no'")

    def _check(self, name: str, right: bool, wanted: str) -> None:
        if not right:
            raise ValueError(f"{name}={getattr(self, name)!r}: give {wanted}")

    def rate(self, step: int, time_share: float = 0.0) -> float:
        """Returns the learning rate of a step, from 0, with that share of the time over; what runs out first rules."""
        done = max(time_share, 0.0 if self.steps is None else (step + 1) / self.steps)
        if done < self.warmup:
            share = done / self.warmup
        else:
            share = 0.5 * (1 + math.cos(math.pi * min(1.0, (done - self.warmup) / (1 - self.warmup or 1))))
        return self.learning_rate * (self.floor + (1 - self.floor) * share)

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers as JSON-able values."""
        return asdict(self)
