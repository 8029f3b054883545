"""Without CUDA graphs a step runs at its own size."""

from __future__ import annotations

from hf_dcut.graphs import ExactShapes


def test_shapes_are_taken_as_they_are() -> None:
    assert ExactShapes().round(3, 17) == (3, 17)
