"""What the tests of the stages share: a batch of requests, written in columns of small numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from hf_dcut.types import Batch


def build_batch(
    length: Sequence[int],
    room: Sequence[int] | None = None,
    anchor: Sequence[int] | None = None,
    rope: Sequence[int] = (),
) -> Batch:
    """Returns requests in slots 0, 1, ..: with plenty of room, anchors 50, 51, .. and plain positions by default."""
    rows = len(length)
    columns = (
        range(rows),
        length,
        anchor or range(50, 50 + rows),
        room or [99] * rows,
        range(rows),
        rope or [0] * rows,
    )
    return Batch(*(torch.tensor(list(column), dtype=torch.int64) for column in columns))


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Batch]:
    """`make_batch(length, room=None, anchor=None, rope=())`, one number a request in each."""
    return build_batch
