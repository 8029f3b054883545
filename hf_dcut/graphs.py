"""Which shapes a step may have. Without CUDA graphs every shape is allowed."""

from __future__ import annotations


class ExactShapes:
    """Every step runs at its own size."""

    def round(self, requests: int, total: int) -> tuple[int, int]:
        """Returns the shape (B, T) that a step of `requests` requests and `total` packed tokens runs at."""
        return requests, total
