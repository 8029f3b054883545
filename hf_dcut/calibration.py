"""How far the drafter's confidences can be believed: accepted drafts over those that its confidences promised.

A drafter that is always sure and seldom right would be granted the largest budget at every step. Its survivals are
therefore scaled by the running ratio before budgets are weighed against each other. One factor for all leaves the
ranking of drafts, and so what a given budget keeps, as it is.
"""

from __future__ import annotations

# Drafts it is believed for beforehand, and promised drafts that the ratio looks back on.
_TRUST = 8.0
_MEMORY = 256.0


class Calibration:
    """A running ratio of accepted to promised drafts."""

    def __init__(self) -> None:
        self.accepted = self.promised = _TRUST

    @property
    def belief(self) -> float:
        """The factor for survivals, in [0, 1]: drafters that are too modest are taken at their word."""
        return min(1.0, self.accepted / self.promised)

    def observe(self, promised: float, accepted: int) -> None:
        """Takes in a step: the sum of the survivals of the drafts that were verified, and how many held."""
        self.promised += promised
        self.accepted += accepted
        fade = min(1.0, _MEMORY / self.promised)
        self.promised *= fade
        self.accepted *= fade
