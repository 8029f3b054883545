"""The packed row: by hand, against a plain loop, and with pieces of prompts behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcut.media import Media, Prompts
from hf_dcut.packing import Chunk, join, pack
from hf_dcut.types import Batch, Cut, Drafts, Packed


def make_drafts(token: Sequence[Sequence[int]], depth: int = 3) -> Drafts:
    tokens = torch.tensor(token, dtype=torch.int64).view(len(token), depth)
    return Drafts.chain(tokens, torch.ones(tokens.shape))


def make_cut(kept: Sequence[int], depth: int) -> Cut:
    keep = torch.arange(depth) < torch.tensor(kept, dtype=torch.int64)[:, None]
    return Cut(keep, len(kept) + sum(kept), 0.5, (depth,) * len(kept))


def columns(packed: Packed) -> list[tuple[int, int, int, int, int]]:
    """Returns token, slot, cell, position and node of every packed row."""
    fields = (packed.token, packed.slot, packed.cell, packed.position, packed.node)
    return list(zip(*(field.tolist() for field in fields), strict=True))


def example(make_batch: Callable[..., Batch]) -> Packed:
    """The row of the module's docstring: three requests that keep 2, 0 and 3 of 3 drafts."""
    batch = make_batch(length=[4, 7, 2], anchor=[10, 20, 30], rope=[0, 0, 5])
    return pack(make_drafts([[11, 12, 13], [21, 22, 23], [31, 32, 33]]), make_cut([2, 0, 3], 3), batch, reach=11)


def test_worked_example(make_batch: Callable[..., Batch]) -> None:
    packed = example(make_batch)
    assert columns(packed) == [
        (10, 0, 4, 4, -1),
        (11, 0, 5, 5, 0),
        (12, 0, 6, 6, 1),
        (20, 1, 7, 7, -1),
        (30, 2, 2, 7, -1),  # its positions are five ahead of its cells
        (31, 2, 3, 8, 0),
        (32, 2, 4, 9, 1),
        (33, 2, 5, 10, 2),
    ]
    assert packed.start.tolist() == [0, 3, 4, 8]
    assert packed.used.tolist() == [7, 8, 6]
    assert packed.logit_rows.tolist() == list(range(8))
    assert (packed.decoding, packed.slots, packed.reach, packed.width) == (3, 3, 11, 4)
    assert (packed.start.dtype, packed.used.dtype, packed.token.dtype) == (torch.int32, torch.int32, torch.int64)


def test_prompts_follow_as_further_requests(make_batch: Callable[..., Batch]) -> None:
    chunks = [
        Chunk(torch.tensor([40, 41]), slot=3, first=6, rope=0, last=True),
        Chunk(torch.tensor([50, 51, 52]), slot=5, first=12, rope=2, last=False),
    ]
    packed = join(example(make_batch), chunks)
    assert columns(packed)[8:] == [
        (40, 3, 6, 6, -1),
        (41, 3, 7, 7, -1),
        (50, 5, 12, 14, -1),
        (51, 5, 13, 15, -1),
        (52, 5, 14, 16, -1),
    ]
    assert packed.start.tolist() == [0, 3, 4, 8, 10, 13]
    assert packed.used.tolist() == [7, 8, 6, 8, 15]
    assert packed.logit_rows.tolist() == [*range(8), 9], "of a prompt only its last token's logits are wanted"
    assert (packed.decoding, packed.slots, packed.reach, packed.width) == (3, 6, 15, 4)


def test_without_prompts_the_row_stays_the_same(make_batch: Callable[..., Batch]) -> None:
    packed = example(make_batch)
    assert join(packed, []) is packed


def test_prompts_alone(make_batch: Callable[..., Batch]) -> None:
    nobody = pack(make_drafts([]), make_cut([], 3), make_batch([]), reach=0)
    assert (len(nobody), nobody.start.tolist(), nobody.decoding) == (0, [0], 0)
    packed = join(nobody, [Chunk(torch.tensor([7, 8]), slot=0, first=0, rope=0, last=True)])
    assert columns(packed) == [(7, 0, 0, 0, -1), (8, 0, 1, 1, -1)]
    assert (packed.start.tolist(), packed.logit_rows.tolist(), packed.slots, packed.reach) == ([0, 2], [1], 1, 2)


def test_prompts_with_images_know_their_place_and_positions(make_batch: Callable[..., Batch]) -> None:
    nobody = pack(make_drafts([]), make_cut([], 3), make_batch([]), reach=0)
    position = torch.arange(3 * 2 * 4).view(3, 2, 4)
    prompts = Prompts({}, position)
    rows = [(1, 2, torch.tensor([5, 6])), (0, 0, torch.tensor([1, 2, 3, 4]))]
    chunks = [
        Chunk(token, slot, 0, -1, True, Media(prompts, row, pads, -1)) for slot, (row, pads, token) in enumerate(rows)
    ]
    packed = join(nobody, chunks)
    assert packed.place is not None
    assert packed.place.row.tolist() == [1, 1, 0, 0, 0, 0]
    assert packed.place.column.tolist() == [2, 3, 0, 1, 2, 3]
    assert packed.cell.tolist() == [0, 1, 0, 1, 2, 3]
    assert torch.equal(packed.position, torch.cat([position[:, 1, 2:], position[:, 0]], dim=1))


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_equals_a_loop_over_requests(make_batch: Callable[..., Batch], data: st.DataObject) -> None:
    rows, depth = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 5))
    numbers = st.lists(st.integers(0, 30), min_size=rows, max_size=rows)
    kept = data.draw(st.lists(st.integers(0, depth), min_size=rows, max_size=rows))
    length, anchor, rope = data.draw(numbers), data.draw(numbers), data.draw(numbers)
    token = [[100 * row + node for node in range(depth)] for row in range(rows)]
    batch = make_batch(length, anchor=anchor, rope=rope)
    packed = pack(make_drafts(token, depth), make_cut(kept, depth), batch, reach=40)
    expected, start = [], [0]
    for row in range(rows):
        for offset, own in enumerate([anchor[row], *token[row][: kept[row]]]):
            cell = length[row] + offset
            expected.append((own, row, cell, cell + rope[row], offset - 1))
        start.append(len(expected))
    assert columns(packed) == expected
    assert packed.start.tolist() == start
    assert packed.used.tolist() == [n + k + 1 for n, k in zip(length, kept, strict=True)]
