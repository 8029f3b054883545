"""How long a part of the check may take."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """A moment at which a part must be done.

    Attributes:
        end: of `time.monotonic()`, which all processes of a machine share.
    """

    end: float = math.inf

    @property
    def left(self) -> float:
        """Seconds until then."""
        return self.end - time.monotonic()

    def late(self, needed: float = 0.0) -> str | None:
        """Returns why something that takes `needed` seconds is left out; None while there is time for it."""
        if self.left > needed:
            return None
        return f"no time: {max(0.0, self.left):.0f} s left in this part" + (f", {needed:.0f} s needed" * (needed > 0))
