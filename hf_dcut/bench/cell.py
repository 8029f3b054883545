"""A cell of a run: data set, batch size, draft length, temperature; and what its rounds say of each method."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_dcut.bench import peers
from hf_dcut.bench.methods import PLAIN, TREE
from hf_dcut.stats import STAGES

_RESAMPLES = 2000
# Fewer rounds than this have no interval.
_LEAST_ROUNDS = 3
# Below so many verified drafts, that all were accepted may be luck.
_MANY_DRAFTS = 32


@dataclass(frozen=True)
class Key:
    """Which cell.

    Attributes:
        data: prompt set.
        batch: B.
        draft_tokens: D.
        temperature: 0 for greedy decoding.
    """

    data: str
    batch: int
    draft_tokens: int
    temperature: float

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields."""
        return asdict(self)

    def __str__(self) -> str:
        heat = f", temperature {self.temperature:g}" if self.temperature else ""
        return f"{self.data}, B = {self.batch}, D = {self.draft_tokens}{heat}"


@dataclass(frozen=True)
class Ratio:
    """A ratio of speeds.

    Attributes:
        value: median over rounds.
        low, high: bootstrap 95 % interval; None with too few rounds.
    """

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        return f"{self.value:.2f}" if self.low is None else f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


class Cell:
    """The rounds of a cell.

    Args:
        key: which.
        rounds: as `run_rounds` yields them.
    """

    def __init__(self, key: Key, rounds: Sequence[dict[str, Any]]):
        self.key, self.rounds = key, list(rounds)

    @property
    def methods(self) -> list[str]:
        """Methods of the cell, in order."""
        return list(self.rounds[0]["methods"]) if self.rounds else []

    @property
    def prompts(self) -> int:
        """Prompts answered, summed over rounds."""
        return sum(entry["prompts"] for entry in self.rounds)

    def numbers(self, method: str, name: str) -> list[Any]:
        """Returns one number of a method, round by round."""
        return [entry["methods"][method].get(name) for entry in self.rounds]

    def total(self, method: str, name: str) -> float:
        """Returns a count of our steps, summed over rounds; 0 for upstream's methods."""
        return sum(stats.get(name, 0) for stats in self._stats(method))

    def mismatches(self, method: str) -> int:
        """Returns answers that differ by more than a tie; such a method has no speed."""
        return sum(value or 0 for value in self.numbers(method, "mismatches"))

    def speed(self, method: str) -> float | None:
        """Returns tokens/s, the median over rounds; None for a method with mismatches."""
        return None if self.mismatches(method) else statistics.median(self._speeds(method))

    def ratio(self, method: str, base: str) -> Ratio | None:
        """Returns the speed over another method's in the same rounds; None if either has none."""
        if any(m not in self.methods or self.mismatches(m) for m in (method, base)):
            return None
        ratios = [a / b for a, b in zip(self._speeds(method), self._speeds(base), strict=True)]
        return interval(ratios)

    def mean_accepted(self, method: str) -> float | None:
        """Returns tokens a request and drafted step, the target's own included; None without drafted steps."""
        rows = self.total(method, "rows")
        return self.total(method, "committed_tokens") / rows if rows else None

    def kept_share(self, method: str) -> float | None:
        """Returns positions verified of those offered, anchors included, over drafted steps; None without."""
        rows = self.total(method, "rows")
        if not rows:
            return None
        # A tree may have more nodes than a chain has drafts.
        offered = self.total(method, "offered_positions") or rows * (self.key.draft_tokens + 1)
        return (rows + self.total(method, "kept")) / offered

    def drafted_share(self, method: str) -> float | None:
        """Returns the share of steps that drafted; None for upstream's methods."""
        steps = self.total(method, "steps")
        return self.total(method, "drafted_steps") / steps if steps else None

    def acceptance(self, method: str) -> list[float]:
        """Returns for each draft place the share of verify rows that accepted it; cut drafts count as not accepted."""
        counts: Counter[int] = Counter()
        for stats in self._stats(method):
            counts.update({int(k): v for k, v in stats["histogram"].items()})
        rows = sum(counts.values())
        places = range(1, self.key.draft_tokens + 1)
        return [sum(v for k, v in counts.items() if k >= place) / rows for place in places] if rows else []

    def step_seconds(self, method: str) -> dict[str, float]:
        """Returns the mean seconds of each stage of a decoding step, prompts read along included; ours only."""
        steps = self.total(method, "steps") or 1
        return {stage: sum(s["stage_seconds"][stage] for s in self._stats(method)) / steps for stage in STAGES}

    def median(self, method: str, name: str) -> float | None:
        """Returns the median over rounds of a number; None where it is not known."""
        values = [value for value in self.numbers(method, name) if value is not None]
        return statistics.median(values) if values else None

    @property
    def pulse(self) -> float | None:
        """Seconds of one and the same piece of work while our methods ran (`pulse.py`); None where not taken."""
        return next((pulse for method in self.methods if (pulse := self.median(method, "pulse"))), None)

    def same_output(self, method: str) -> str:
        """Returns how many answers equal the reference's, and how many of the others are ties."""
        equal = self.numbers(method, "equal")
        if None in equal:
            return "-"
        ties = sum(value or 0 for value in self.numbers(method, "ties"))
        wrong = self.mismatches(method)
        words = [f"{sum(equal)}/{self.prompts}"] + [f"{ties} ties"] * bool(ties) + [f"{wrong} MISMATCHES"] * bool(wrong)
        return ", ".join(words)

    def alarms(self) -> list[str]:
        """Returns what cannot be right: answers that differ, drafts that are all rejected or all accepted."""
        found = []
        for method in self.methods:
            kept, accepted = self.total(method, "kept"), self.total(method, "accepted_tokens")
            if self.mismatches(method):
                found.append(f"{method}: {self.mismatches(method)} answers are not the target's, so it has no speed")
            if kept and not accepted:
                found.append(f"{method}: mean accepted tokens are exactly 1.00, no draft was ever right")
            if kept >= _MANY_DRAFTS and accepted == kept:
                found.append(f"{method}: every single draft was accepted")
        return found

    def best_fixed(self, trees: bool = False) -> str | None:
        """Returns the fastest fixed budget, of chains or of both; None without any."""
        names = {m: m.removeprefix(TREE) if trees else m for m in self.methods}
        fixed = [m for m, name in names.items() if name.replace(".", "", 1).isdecimal() and self.speed(m) is not None]
        return max(fixed, key=lambda m: self.speed(m) or 0.0, default=None)

    def base(self) -> str | None:
        """Returns what ratios are of where one column must do: our plain decoding, else plain `generate`."""
        return next((m for m in (PLAIN, peers.GENERATE) if m in self.methods), None)

    def _speeds(self, method: str) -> list[float]:
        pairs = zip(self.numbers(method, "tokens"), self.numbers(method, "seconds"), strict=True)
        return [tokens / seconds for tokens, seconds in pairs]

    def _stats(self, method: str) -> list[dict[str, Any]]:
        return [stats for stats in self.numbers(method, "stats") if stats is not None]


def interval(ratios: Sequence[float]) -> Ratio:
    """Returns the median of paired ratios with its bootstrap 95 % interval, drawn from a fixed seed."""
    value = statistics.median(ratios)
    if len(ratios) < _LEAST_ROUNDS:
        return Ratio(value, None, None)
    dice = random.Random(0)
    medians = sorted(statistics.median(dice.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    cut = round(0.025 * _RESAMPLES)
    return Ratio(value, medians[cut], medians[-cut - 1])
