"""Slots keep their own cells; moving and copying touch no others."""

from __future__ import annotations

import pytest
import torch

from hf_dcut.acceptance import accept
from hf_dcut.branching import branch
from hf_dcut.cache import LayerShape, SlotCache, SlotLayer, cache_bytes
from hf_dcut.packing import Chunk, join, pack
from hf_dcut.types import Batch, Cut, Drafts, Packed

SHAPES = [LayerShape(2, 4, 2, 4), LayerShape(1, 6, 1, 2)]  # K and V of the second differ, as in latent attention


@pytest.fixture
def cache() -> SlotCache:
    cache = SlotCache(SHAPES, slots=3, length=5, dtype=torch.float64, device="cpu")
    for layer in cache.layers:
        layer.keys.copy_(torch.randn(layer.keys.shape, dtype=torch.float64))
        layer.values.copy_(torch.randn(layer.values.shape, dtype=torch.float64))
    return cache


def contents(cache: SlotCache) -> list[torch.Tensor]:
    return [tensor.clone() for layer in cache.layers for tensor in (layer.keys, layer.values)]


def test_rows_are_stored_at_their_slot_and_cell(cache: SlotCache) -> None:
    layer, before = cache.layers[0], contents(cache)[0]
    slot, cell = torch.tensor([2, 0, 2]), torch.tensor([4, 1, 0])
    key, value = torch.randn(3, 2, 4, dtype=torch.float64), torch.randn(3, 2, 4, dtype=torch.float64)
    layer.store(slot, cell, key, value)
    for row, (s, c) in enumerate([(2, 4), (0, 1), (2, 0)]):
        assert torch.equal(layer.keys[s, c], key[row])
        assert torch.equal(layer.values[s, c], value[row])
        before[s, c] = key[row]
    assert torch.equal(layer.keys, before), "all other cells stay"


def test_views_are_heads_first_and_no_copies(cache: SlotCache) -> None:
    layer = cache.layers[1]
    key, value = layer.view(slots=2, reach=3)
    assert (tuple(key.shape), tuple(value.shape)) == ((2, 1, 3, 6), (2, 1, 3, 2))
    layer.keys[1, 2, 0, 5] = 7.0
    assert key[1, 0, 2, 5] == 7.0


def test_move_and_copy(cache: SlotCache) -> None:
    before = contents(cache)
    cache.move(2, 0)
    cache.copy(2, 1, length=3)
    for now, old in zip(contents(cache), before, strict=True):
        assert torch.equal(now[0], old[2])
        assert torch.equal(now[1, :3], old[2, :3])
        assert torch.equal(now[1, 3:], old[1, 3:])
        assert torch.equal(now[2], old[2])


def test_the_size_that_is_told_is_the_size_that_is_taken(cache: SlotCache) -> None:
    taken = sum(tensor.numel() * tensor.itemsize for tensor in contents(cache))
    assert cache_bytes(SHAPES, slots=3, length=5, dtype=torch.float64) == taken


def test_lengths_belong_to_slots_not_to_the_cache(cache: SlotCache) -> None:
    assert cache.get_seq_length() == 0
    assert SlotLayer(SHAPES[0], 3, 5, torch.float32, "cpu").get_max_length() == 5


# Trees.

#  anchor ── 1 ── 3      slot 0: cells 1 .. 4 hold anchor, 1, 2, 3; slot 1: 0 .. 3.
#         └─ 2
PARENT = [-1, -1, 0]


def make_trees(parent: list[int], reach: int = 5) -> Packed:
    """Returns a row of two requests with one cell in use and none, and the same tree, before a prompt in slot 2."""
    columns = [[0, 1], [1, 0], [9, 9], [9, 9], [0, 1], [0, 0]]
    batch = Batch(*map(torch.tensor, columns))
    token, keep = torch.tensor([[1, 2, 3]] * 2), torch.ones(2, 3, dtype=torch.bool)
    chains = pack(Drafts.chain(token, torch.ones(2, 3)), Cut(keep, 8, 1.0, (3, 3)), batch, reach)
    prompt = Chunk(torch.tensor([7, 8]), slot=2, first=1, rope=0, last=True)
    return join(branch(chains, torch.tensor([parent] * 2)), [prompt])


def moved(cache: SlotCache, parent: list[int], *choice: int) -> list[tuple[int, int, int]]:
    """Returns which cells of which slot got what another held, of all layers, when the target chooses so."""
    packed, before = make_trees(parent), contents(cache)
    cache.commit(accept(torch.tensor(choice), packed), packed)
    found = []
    for slot in range(3):
        for cell in range(5):
            sources = {
                next(c for c in range(5) if torch.equal(now[slot, cell], old[slot, c]))
                for now, old in zip(contents(cache), before, strict=True)
            }
            assert len(sources) == 1, "K and V of all layers go together"
            found += [(slot, source, cell) for source in sources if source != cell]
    return found


def test_the_accepted_path_moves_together(cache: SlotCache) -> None:
    # Slot 0: 1 and 3 hold, of which 1 lies behind the anchor already. Slot 1: 2 holds.
    assert moved(cache, PARENT, *(1, 3, 0, 0), *(2, 0, 0, 0), 0) == [(0, 4, 3), (1, 2, 1)]


def test_cells_that_are_read_and_written_at_once(cache: SlotCache) -> None:
    # A path of 2 and 3: cells 2 and 3 behind the anchor's go to 1 and 2.
    assert moved(cache, [-1, -1, 1], *(2, 0, 3, 0), *(2, 0, 3, 0), 0) == [(0, 3, 2), (0, 4, 3), (1, 2, 1), (1, 3, 2)]


def test_a_path_in_its_place_moves_nothing(cache: SlotCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("stored what lies there")

    monkeypatch.setattr(SlotLayer, "store", refuse)
    assert moved(cache, PARENT, *(1, 0, 0, 0), *(0, 0, 0, 0), 0) == []
    assert moved(cache, [-1, 0, 1], *(1, 2, 3, 0), *(1, 2, 0, 0), 0) == []


def test_layers_that_hold_nothing_have_nothing_to_move() -> None:
    cache = SlotCache([SHAPES[0], LayerShape(0, 0, 0, 0)], slots=3, length=5, dtype=torch.float64, device="cpu")
    packed = make_trees(PARENT)
    cache.commit(accept(torch.tensor([2] * 9), packed), packed)
