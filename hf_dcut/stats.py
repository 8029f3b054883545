"""What the steps did: running sums always, a record of every step on request.

Counts obey two identities that the tests hold them to: the acceptance histogram sums to `rows`, and weighted by its
index to `accepted_tokens`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_dcut.wording import counted

STAGES = ("draft", "select", "verify", "accept", "commit", "observe")


@dataclass(slots=True)
class StepRecord:
    """One step, for traces.

    Attributes:
        requests: ids of the decoding requests.
        drafted, kept, accepted, committed: drafts offered, verified and committed, and tokens added, one number a
            request.
        budget: the ratio that was chosen; None in plain steps.
        total: packed tokens, T, and prompt tokens that were read along.
        seconds: of each stage, and "total".
    """

    requests: list[int]
    drafted: list[int]
    kept: list[int]
    accepted: list[int]
    committed: list[int]
    budget: float | None
    total: int
    seconds: dict[str, float]


@dataclass
class Stats:
    """Sums over all steps of a call.

    Attributes:
        new_tokens: generated tokens, the one after the prompt included.
        prompt_tokens, shared_tokens: prompt tokens read, and those copied from a request with the same prompt.
        evictions: how often a request lost its slot and was resumed.
        steps, drafted_steps, plain_steps: decoding steps, and of what kind. Steps that only read prompts are in none.
        rows: verify rows: requests summed over drafted steps.
        drafted, kept, accepted_tokens: drafts offered, verified and committed.
        committed_tokens: tokens that drafted steps added, accepted drafts and the target's own.
        histogram: how many verify rows accepted 0, 1, 2, .. drafts.
        offered_positions, verified_positions: B (D+1) and T summed over drafted steps.
        budgets: how often each ratio was chosen.
        stage_seconds: seconds of each stage. On a GPU a stage that waits for the device is charged for what it waits.
        seconds, longest_step: of all steps and of the longest, measuring costs excluded.
        slots, live: slots there were, and slots that were taken, summed over all steps.
        cells, used_cells: cells of all slots, and those that held K/V, summed over all steps.
        profile_seconds: spent measuring the cost table.
        records: a `StepRecord` a step if kept, else None.
        finish_reasons: of each request, in order of its id.
    """

    new_tokens: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    evictions: int = 0
    steps: int = 0
    drafted_steps: int = 0
    plain_steps: int = 0
    rows: int = 0
    drafted: int = 0
    kept: int = 0
    accepted_tokens: int = 0
    committed_tokens: int = 0
    histogram: Counter[int] = field(default_factory=Counter)
    offered_positions: int = 0
    verified_positions: int = 0
    budgets: Counter[float] = field(default_factory=Counter)
    stage_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    seconds: float = 0.0
    longest_step: float = 0.0
    slots: int = 0
    live: int = 0
    cells: int = 0
    used_cells: int = 0
    profile_seconds: float = 0.0
    records: list[StepRecord] | None = None
    finish_reasons: list[str | None] = field(default_factory=list)

    @property
    def mean_accepted_tokens(self) -> float:
        """Tokens committed per request and drafted step, the target's own included (the paper's MAT); 0 if none."""
        return self.committed_tokens / self.rows if self.rows else 0.0

    @property
    def kept_share(self) -> float:
        """Positions verified of those offered, anchors included, over drafted steps; 0 if none."""
        return self.verified_positions / self.offered_positions if self.offered_positions else 0.0

    @property
    def drafted_share(self) -> float:
        """Decoding steps that drafted, of all; 0 if none."""
        return self.drafted_steps / self.steps if self.steps else 0.0

    @property
    def occupancy(self) -> float:
        """Slots that were taken, of all, over all steps; 0 if none."""
        return self.live / self.slots if self.slots else 0.0

    @property
    def cells_used(self) -> float:
        """Cells that held K/V, of all that memory was taken for, over all steps; 0 if none."""
        return self.used_cells / self.cells if self.cells else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the seconds of the call."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def kept_depths(self) -> list[list[int]]:
        """Drafts verified of each request, step by step; needs the records of `return_dict_in_generate=True`."""
        return [record.kept for record in self._steps()]

    @property
    def accepted(self) -> list[list[int]]:
        """Drafts accepted of each request, step by step; needs the records of `return_dict_in_generate=True`."""
        return [record.accepted for record in self._steps()]

    def _steps(self) -> list[StepRecord]:
        if self.records is None:
            raise ValueError("stats has no records of single steps: generate with return_dict_in_generate=True")
        return [record for record in self.records if record.requests]

    def add(self, record: StepRecord, depth: int) -> None:
        """Adds one step in which each request was offered `depth` drafts."""
        for stage, seconds in record.seconds.items():
            if stage in self.stage_seconds:
                self.stage_seconds[stage] += seconds
        self.steps += bool(record.requests)
        self.plain_steps += bool(record.requests) and record.budget is None
        if record.budget is not None:
            self._add_drafted(record, depth)
        if self.records is not None:
            self.records.append(record)

    def took(self, seconds: float) -> None:
        """Adds the time of a step."""
        self.seconds += seconds
        self.longest_step = max(self.longest_step, seconds)

    def occupy(self, slots: int, length: int, used: Sequence[int]) -> None:
        """Adds a step's occupancy: requests that used so many cells each, in slots of `length` cells."""
        self.slots += slots
        self.live += len(used)
        self.cells += slots * length
        self.used_cells += sum(used)

    def _add_drafted(self, record: StepRecord, depth: int) -> None:
        requests = len(record.requests)
        self.drafted_steps += 1
        self.rows += requests
        self.drafted += sum(record.drafted)
        self.kept += sum(record.kept)
        self.accepted_tokens += sum(record.accepted)
        self.committed_tokens += sum(record.committed)
        self.histogram.update(record.accepted)
        self.offered_positions += requests * (depth + 1)
        self.verified_positions += requests + sum(record.kept)
        self.budgets[record.budget] += 1  # type: ignore[index]

    def to_dict(self) -> dict[str, Any]:
        """Returns the sums as JSON-able values, without the records of single steps."""
        names = (
            "new_tokens prompt_tokens shared_tokens evictions steps drafted_steps plain_steps rows drafted kept "
            "accepted_tokens committed_tokens offered_positions mean_accepted_tokens kept_share drafted_share "
            "tokens_per_second seconds longest_step occupancy cells_used profile_seconds stage_seconds finish_reasons"
        )
        values = {name: getattr(self, name) for name in names.split()}
        values["histogram"] = {str(k): v for k, v in sorted(self.histogram.items())}
        values["budgets"] = {str(k): v for k, v in sorted(self.budgets.items())}
        return values

    def __str__(self) -> str:
        lines = [
            f"{counted(self.new_tokens, 'new token')} in {self.seconds:.2f} s: {self.tokens_per_second:.1f} tokens/s"
        ]
        lines.append(f"{counted(self.steps, 'step')}, {self.drafted_share:.0%} of them drafted")
        if self.rows:
            verified = f"{self.kept_share:.0%} of positions verified"
            lines.append(f"{self.mean_accepted_tokens:.2f} tokens a request and drafted step, {verified}")
            chosen = ", ".join(f"{k:g} x {v}" for k, v in sorted(self.budgets.items()))
            lines.append(f"budgets chosen: {chosen}")
            lines.append("drafts accepted: " + ", ".join(f"{k}: {v}" for k, v in sorted(self.histogram.items())))
        total = sum(self.stage_seconds.values())
        if total:
            split = ", ".join(f"{k} {v / total:.0%}" for k, v in self.stage_seconds.items() if v)
            lines.append(f"time: {split}")
        if self.profile_seconds:
            lines.append(f"cost table measured beforehand in {self.profile_seconds:.1f} s")
        return "\n".join(lines)


class Stopwatch:
    """Splits a step's time into stages."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """Charges the time since the last lap to a stage."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self.last
        self.last = now

    def stop(self) -> dict[str, float]:
        """Returns the seconds of each stage and their "total"."""
        return {**self.seconds, "total": time.perf_counter() - self.start}
