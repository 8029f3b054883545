"""`Plan`: what a run measures, and its checks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from hf_dcut.bench.cell import Key
from hf_dcut.bench.methods import DEFAULT_METHODS, check_method
from hf_dcut.bench.rounds import CALLS, STEPS


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        target: folder or Hub id of the model.
        drafter: folder or Hub id of a drafter, or another name that `make_drafter` knows.
        assistant: folder or Hub id of a small model for the method "assisted".
        data: prompt sets, as in `prompts.read_prompts`.
        batch_sizes: requests at once.
        methods: as in `running.run`.
        prompts: of each cell, at least one batch; a set with fewer begins again.
        per_slot: prompts for each slot at least; 2 or more keep the batch full for a part of the run.
        max_new_tokens: of each.
        rounds: timed repeats at least.
        turns: "step" lets our methods take turns step by step within a round, "call" runs each as a whole, which is
            all that fits where memory is short; None takes steps on a CPU, and calls on a GPU, whose speed is steady.
        draft_tokens: lengths of drafts to compare; none for the drafter's own.
        temperatures: 0 for greedy decoding.
        record: prompts of each data set whose drafts are recorded for the replay.
        max_prompt_tokens: longer prompts are left out; None allows what the model can hold.
        show: answers to print.
        dtype: of the target.
        out: JSON-lines file for the numbers; None writes none.
    """

    target: str
    drafter: str
    assistant: str | None = None
    data: tuple[str, ...] = ("gsm8k",)
    batch_sizes: tuple[int, ...] = (1, 4, 16, 32)
    methods: tuple[str, ...] = DEFAULT_METHODS
    prompts: int = 4
    per_slot: int = 1
    max_new_tokens: int = 48
    rounds: int = 3
    turns: str | None = None
    draft_tokens: tuple[int, ...] = ()
    temperatures: tuple[float, ...] = (0.0,)
    record: int = 0
    max_prompt_tokens: int | None = None
    show: int = 0
    dtype: str = "auto"
    out: Path | None = None

    def __post_init__(self) -> None:
        for name in ("data", "batch_sizes", "methods", "temperatures"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name}={values!r}: give one or more, each once")
        counts = (*self.batch_sizes, *self.draft_tokens, self.prompts, self.per_slot, self.max_new_tokens, self.rounds)
        if min(counts) < 1 or min(self.record, self.show) < 0:
            raise ValueError(
                f"batch_sizes={self.batch_sizes}, draft_tokens={self.draft_tokens}, prompts={self.prompts}, "
                f"per_slot={self.per_slot}, max_new_tokens={self.max_new_tokens}, rounds={self.rounds}, "
                f"record={self.record}, show={self.show}: give positive integers; record and show may be 0"
            )
        if min(self.temperatures) < 0:
            raise ValueError(f"temperatures={self.temperatures}: give 0 for greedy decoding, or positive numbers")
        if self.turns not in (None, STEPS, CALLS):
            raise ValueError(f"turns={self.turns!r}: give {STEPS!r}, {CALLS!r}, or None to let the device decide")
        for method in self.methods:
            check_method(method)
        if "assisted" in self.methods and self.assistant is None:
            raise ValueError("method 'assisted' needs a small model: give --assistant, or leave the method out")

    def cells(self, own: int) -> list[Key]:
        """Returns the cells in the order they are measured.

        Args:
            own: D of the drafter, which stands for no `draft_tokens`.

        Raises:
            ValueError: a length of drafts beyond that.
        """
        lengths = self.draft_tokens or (own,)
        if max(lengths) > own:
            raise ValueError(f"draft_tokens={lengths}: the drafter makes {own}, give at most that")
        return [Key(d, b, n, t) for d, n, t, b in product(self.data, lengths, self.temperatures, self.batch_sizes)]

    def count(self, batch: int) -> int:
        """Returns the prompts of a cell."""
        return max(self.prompts, batch * self.per_slot)

    def to_dict(self) -> dict[str, Any]:
        """Returns what the numbers depend on, JSON-able: everything but where they go and what is printed."""
        return {k: v for k, v in asdict(self).items() if k not in ("out", "show")}
