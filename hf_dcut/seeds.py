"""One seed a request: given, or drawn from a generator or from torch's global state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Seeds:
    """Where seeds come from.

    Attributes:
        seed: one integer, from which row i takes seed + i; or one a row; or None.
        generator: draws them when no seed is given; None draws from torch's global state, as sampling does.
    """

    seed: int | Sequence[int] | None = None
    generator: torch.Generator | None = None

    def draw(self, rows: int) -> list[int]:
        """Returns one seed a row.

        Raises:
            TypeError, ValueError: something else than integers, both a seed and a generator, or the wrong number.
        """
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise TypeError(f"generator is a {type(self.generator).__name__}: give a torch.Generator")
        if self.seed is not None and self.generator is not None:
            raise ValueError(f"seed={self.seed!r} and generator are two sources of randomness: give one of them")
        if self.seed is None:
            device = "cpu" if self.generator is None else self.generator.device
            return torch.randint(2**63 - 1, (rows,), generator=self.generator, device=device).tolist()
        seeds = range(self.seed, self.seed + rows) if isinstance(self.seed, int) else self.seed
        if isinstance(self.seed, bool) or not isinstance(seeds, Sequence) or not all(type(s) is int for s in seeds):
            raise TypeError(f"seed={self.seed!r}: give an integer, or one a request")
        if len(seeds) != rows:
            raise ValueError(f"seed has {len(seeds)} entries for {rows} requests: give one a request, or one integer")
        # Philox keys are 64 bits wide; negative seeds are folded into the 63 that int64 shares with them.
        return [seed & (2**63 - 1) for seed in seeds]
