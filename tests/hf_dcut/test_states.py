"""States take in the accepted tokens of a step and no others, to the bit; slots touch no other slots."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from hf_dcut.cache import LayerShape, SlotCache, cache_bytes
from hf_dcut.states import StateLayer, StateShape, Steps

SHAPE = StateShape(width=3, channels=5, heads=4, key_dim=8, value_dim=6)
SLOTS, ROWS = 4, 5
RULE = functools.partial(torch_recurrent_gated_delta_rule, output_final_state=True, use_qk_l2norm_in_kernel=True)


@pytest.fixture
def layer() -> StateLayer:
    layer, generator = StateLayer(SHAPE, SLOTS, torch.float32, "cpu"), torch.Generator().manual_seed(0)
    layer.window.normal_(generator=generator)
    layer.state.normal_(generator=generator)
    return layer


def contents(layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.window.clone(), layer.state.clone()


def steps_of(layer: StateLayer, requests: int, rows: int, seed: int = 1) -> Steps:
    """Returns made-up steps of requests in the first slots."""
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(requests, rows, *shape, generator=generator)

    seen = torch.cat([layer.window[:requests], made(SHAPE.channels)], dim=1)
    key, value = made(2, SHAPE.key_dim), made(SHAPE.heads, SHAPE.value_dim)
    decay, beta = -made(SHAPE.heads).abs(), made(SHAPE.heads).sigmoid()
    options = {"g": decay, "beta": beta, "initial_state": layer.state[:requests]}
    state = RULE(key, key, value, **options)[1] if rows == 1 else None
    return Steps(seen, key, value, decay, beta, state, RULE)


@pytest.mark.parametrize("accepted", [[0, 2, 4], [4, 4, 4], [0, 0, 0], [1, 0, 3]])
def test_accepted_rows_are_taken_in_one_by_one(layer: StateLayer, accepted: list[int]) -> None:
    window, state = contents(layer)
    steps = layer.steps = steps_of(layer, len(accepted), ROWS)
    layer.commit(torch.tensor(accepted), longest=max(accepted) + 1)
    for slot, count in enumerate(accepted):
        for row in range(count + 1):
            one, at = slice(slot, slot + 1), slice(row, row + 1)
            options = {"g": steps.decay[one, at], "beta": steps.beta[one, at], "initial_state": state[one]}
            state[one] = RULE(steps.key[one, at], steps.key[one, at], steps.value[one, at], **options)[1]
            window[slot] = torch.cat([window[slot, 1:], steps.seen[slot, [SHAPE.width + row]]])
    assert torch.equal(layer.state, state)
    assert torch.equal(layer.window, window)


def test_a_step_of_one_row_is_taken_in_as_it_is(layer: StateLayer) -> None:
    steps = layer.steps = steps_of(layer, 2, 1)
    layer.commit(torch.tensor([0, 0]), longest=1)
    assert torch.equal(layer.state[:2], steps.state)
    assert torch.equal(layer.window[:2], steps.seen[:, 1:])


def test_pieces_of_prompts_and_decoding_requests_are_taken_in_together(layer: StateLayer) -> None:
    before = contents(layer)
    layer.steps = steps_of(layer, 1, ROWS)
    piece = torch.ones(3, 5), torch.full((4, 8, 6), 2.0)
    layer.pieces.append((2, *piece))
    layer.commit(torch.tensor([1]), longest=2)
    for now, old, own in zip(contents(layer), before, piece, strict=True):
        assert torch.equal(now[2], own)
        assert torch.equal(now[[1, 3]], old[[1, 3]])
        assert not torch.equal(now[0], old[0])
    again = contents(layer)
    layer.commit(torch.tensor([1]), longest=2)
    assert all(map(torch.equal, contents(layer), again)), "what was taken in is not taken in twice"


def test_what_was_not_committed_leaves_no_trace(layer: StateLayer) -> None:
    before = contents(layer)
    layer.steps = steps_of(layer, 2, ROWS)
    layer.pieces.append((2, torch.ones(3, 5), torch.ones(4, 8, 6)))
    layer.begin()
    layer.commit(torch.tensor([1, 1]), longest=2)
    assert all(map(torch.equal, contents(layer), before))


def test_slots_of_a_cache_move_are_copied_and_start_anew() -> None:
    cells = LayerShape(1, 2, 1, 2)
    cache = SlotCache([SHAPE, cells, SHAPE], slots=SLOTS, length=6, dtype=torch.float32, device="cpu")
    assert cache.recurrent
    assert not SlotCache([cells], slots=1, length=6, dtype=torch.float32, device="cpu").recurrent
    for layer in cache.states:
        layer.window.normal_()
        layer.state.normal_()
    before = [contents(layer) for layer in cache.states]
    cache.move(3, 0)
    cache.copy(3, 1, length=4)
    cache.free(3)
    for layer, old in zip(cache.states, before, strict=True):
        for now, was in zip(contents(layer), old, strict=True):
            assert torch.equal(now[:3], was[[3, 3, 2]])
            assert not now[3].any()


def test_a_slot_counts_its_state_before_and_after_a_step() -> None:
    layer = StateLayer(SHAPE, SLOTS, torch.float64, "cpu")
    taken = sum(tensor.numel() * tensor.itemsize for tensor in contents(layer))
    assert cache_bytes([SHAPE], SLOTS, length=1, dtype=torch.float64) == 2 * taken
    assert cache_bytes([SHAPE], SLOTS, length=99, dtype=torch.float64) == 2 * taken, "however long the requests"
