"""Slots keep their own cells; moving and copying touch no others."""

from __future__ import annotations

import pytest
import torch

from hf_dcut.cache import LayerShape, SlotCache, SlotLayer, cache_bytes

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
