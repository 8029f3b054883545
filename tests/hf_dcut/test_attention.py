"""Packed attention against a loop over single queries in float64, and whom it leaves alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from hf_dcut import attention, ragged
from hf_dcut.attention import PackedAttention, packed_attention
from hf_dcut.grouped import best_width
from hf_dcut.kernels import packed_attention as ragged_attention
from hf_dcut.ragged import long_row
from hf_dcut.types import Packed

HEADS, KV_HEADS, DIM = 4, 2, 8
ULPS = 1e-12  # float64 sums of some tens of terms in another order
SINGLE = 1e-5  # the same sums of numbers about 1 in float32

# First cell and number of rows of each request.
Pieces = Sequence[tuple[int, int]]


def make_row(decoding: Pieces, prompts: Pieces = (), width: int = 5) -> Packed:
    """Returns a packed row of decoding requests in slots 0, 1, .. and of prompt pieces in the slots after them."""
    pieces = [*decoding, *prompts]
    slot = [i for i, (_, count) in enumerate(pieces) for _ in range(count)]
    cell = [first + k for first, count in pieces for k in range(count)]
    node = [k - 1 for _, count in decoding for k in range(count)] + [-1] * sum(count for _, count in prompts)
    sizes = torch.tensor([0, *(count for _, count in pieces)])
    return Packed(
        token=torch.zeros(len(cell), dtype=torch.int64),
        slot=torch.tensor(slot),
        cell=torch.tensor(cell),
        position=torch.tensor(cell),
        node=torch.tensor(node),
        start=sizes.cumsum(0).int(),
        used=torch.tensor([first + count for first, count in pieces], dtype=torch.int32),
        logit_rows=torch.arange(len(cell)),
        decoding=len(decoding),
        slots=len(pieces),
        reach=max([first + width for first, _ in decoding] + [first + count for first, count in prompts]),
        width=width,
    )


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cells: Sequence[int],
    scaling: float,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns what one query [heads, dim] gathers from cells of K/V [kv heads, cells, dim]."""
    out, group = torch.zeros(HEADS, DIM, dtype=torch.float64), HEADS // KV_HEADS
    for head in range(HEADS):
        scores = [float(query[head] @ key[head // group, cell]) * scaling for cell in cells]
        if softcap is not None:
            scores = [softcap * math.tanh(score / softcap) for score in scores]
        weights = [math.exp(score) for score in scores]
        total = sum(weights) + (0.0 if s_aux is None else math.exp(s_aux[head]))
        for weight, cell in zip(weights, cells, strict=True):
            out[head] += weight / total * value[head // group, cell]
    return out


def random_states(packed: Packed) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns queries of the row and K/V of its slots; cells that nobody may see hold huge numbers."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, HEADS, len(packed), DIM, dtype=torch.float64, generator=generator)
    shape = (packed.slots, KV_HEADS, packed.reach, DIM)
    key, value = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    for slot, used in enumerate(packed.used.tolist()):
        key[slot, :, used:] = value[slot, :, used:] = 1e30
    return query, key, value


ROWS = {
    "one request": make_row([(6, 3)]),
    "ragged requests": make_row([(6, 3), (0, 1), (2, 5), (9, 1)]),
    "requests with equally many rows": make_row([(6, 2), (0, 2), (3, 2)]),
    "one row each": make_row([(6, 1), (0, 1), (3, 1)]),
    "one prompt": make_row([], [(0, 6)]),
    "prompts of several lengths": make_row([], [(0, 6), (0, 1), (0, 9)]),
    "prompts that begin mid-slot": make_row([], [(4, 5), (0, 2), (7, 1)]),
    "requests and prompts": make_row([(6, 2), (3, 5)], [(0, 4), (5, 6)]),
    # On a CPU the tails of the long ones are attended to apart, lest they set the padding of all.
    "a long request": make_row([(6, 1), (0, 2), (2, 30), (9, 1)], width=31),
    # Padded to two rows each there are as many as in the packed row, but not the same.
    "a tail as long as the padding": make_row([*[(3, 1)] * 28, (2, 2), (5, 2), (0, 30)], width=31),
    "long requests and prompts": make_row([(3, 25), (0, 1), (5, 1), (2, 1), (7, 28)], [(0, 4), (5, 6)], width=31),
}


# What a layer may do to its scores: no window, one; a soft cap that bends scores of about 1; a sink a head.
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "soft cap": {"softcap": 0.8},
    "sinks": {"s_aux": torch.tensor([0.5, -2.0, 3.0, 0.0], dtype=torch.float64)},
    "both": {"softcap": 2.0, "s_aux": torch.tensor([1.0, 0.0, -1.0, 2.0], dtype=torch.float64)},
}


@pytest.mark.parametrize("extras", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("packed", ROWS.values(), ids=ROWS)
def test_equals_the_loop(packed: Packed, window: int | None, extras: dict[str, Any], poisoned_memory: None) -> None:
    query, key, value = random_states(packed)
    call = PackedAttention(packed)
    out, weights = call(nn.Module(), query, key, value, None, scaling=0.3, sliding_window=window, **extras)
    assert weights is None
    assert out.shape == (1, len(packed), HEADS, DIM)
    for row, (slot, cell) in enumerate(zip(packed.slot.tolist(), packed.cell.tolist(), strict=True)):
        cells = range(0 if window is None else max(0, cell - window + 1), cell + 1)
        expected = attend(query[0, :, row], key[slot], value[slot], cells, 0.3, **extras)
        assert torch.allclose(out[0, row], expected, rtol=ULPS, atol=ULPS)


def prepare(path: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the device on which a path is tried, after making it one that can be."""
    if path == "triton":
        pytest.importorskip("triton")
    if path.startswith("by"):
        given = partial(ragged_attention, path="reference")
        monkeypatch.setattr(ragged, "packed_attention", lambda *layout, path, **others: given(*layout, **others))
    return "cuda" if torch.cuda.is_available() and path == "triton" else "cpu"


@pytest.mark.parametrize(("window", "extras"), [(None, "plain"), (4, "plain"), (4, "both")])
@pytest.mark.parametrize("path", ["reference", "triton", "by the kernels' reference"])
@pytest.mark.parametrize("packed", ROWS.values(), ids=ROWS)
def test_every_path_gives_the_same(
    packed: Packed, path: str, window: int | None, extras: str, monkeypatch: pytest.MonkeyPatch, poisoned_memory: None
) -> None:
    device = prepare(path, monkeypatch)
    states = [x.float().to(device) for x in random_states(packed)]
    more = {k: x.float().to(device) if isinstance(x, torch.Tensor) else x for k, x in EXTRAS[extras].items()}
    out, _ = PackedAttention(packed.to(device), path)(nn.Module(), *states, None, sliding_window=window, **more)
    plain = PackedAttention(packed)
    expected, _ = plain(nn.Module(), *random_states(packed), None, sliding_window=window, **EXTRAS[extras])
    assert torch.allclose(out.double().cpu(), expected, rtol=0, atol=SINGLE)


def test_keys_and_values_of_different_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As latent attention expands them: K made anew, V a view of what K and V share."""
    packed = ROWS["ragged requests"]
    query, key, value = random_states(packed)
    wide = torch.zeros(packed.slots, packed.reach, KV_HEADS, 2 * DIM, dtype=torch.float64)
    wide[..., DIM:] = value.transpose(1, 2)
    given = partial(ragged_attention, path="reference")
    monkeypatch.setattr(ragged, "packed_attention", lambda *layout, path, **others: given(*layout, **others))
    out, _ = PackedAttention(packed, "fused")(nn.Module(), query, key, wide.transpose(1, 2)[..., DIM:], None)
    expected, _ = PackedAttention(packed)(nn.Module(), query, key, value, None)
    assert torch.allclose(out, expected, rtol=ULPS, atol=ULPS)


def test_slots_are_one_long_row() -> None:
    storage = torch.arange(4 * 9 * 2 * 3).view(4, 9, 2, 3)  # 4 slots of 9 cells
    states = storage[:3, :5].transpose(1, 2)
    row, length = long_row(states)
    assert length == 9
    for slot in range(3):
        assert torch.equal(row[slot * length : slot * length + 5], storage[slot, :5])
    assert row.data_ptr() == storage.data_ptr(), "a view, not a copy"
    assert long_row(storage[:1, :5].transpose(1, 2))[1] == 9


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_padding_takes_the_fewest_rows(counts: list[int]) -> None:
    def rows(width: int) -> int:
        total = 0
        for count in counts:
            total += width
            if count > width:
                total += 20 + count - width  # a piece of its own
        return total

    assert rows(best_width(counts)) == min(rows(width) for width in range(1, max(counts) + 1))


def test_padding_by_hand() -> None:
    assert [best_width(counts) for counts in ([2, 1, 1, 16], [16, 16, 15], [1], [40, 1])] == [2, 16, 1, 1]


# Trees: a node attends as if the way to it were all of its text.


def make_trees(trees: Sequence[tuple[int, Sequence[int]]], prompts: Pieces = (), width: int = 5) -> Packed:
    """Returns a packed row of requests with so many cells before their anchors, whose nodes follow these."""
    packed = make_row([(first, len(parent) + 1) for first, parent in trees], prompts, width)
    ancestors = torch.zeros(sum(len(parent) + 1 for _, parent in trees), width, dtype=torch.bool)
    row = 0
    for _, parent in trees:
        for node in range(-1, len(parent)):
            ancestors[row, [0, *(step + 1 for step in way(parent, node))]] = True
            row += 1
    return replace(packed, ancestors=ancestors)


def way(parent: Sequence[int], node: int) -> list[int]:
    """Returns the nodes from the first behind the anchor to this one."""
    return [] if node < 0 else [*way(parent, parent[node]), node]


BINARY = [-1, -1, *((node - 2) // 2 for node in range(2, 30))]
TREES = {
    "one tree": make_trees([(6, [-1, -1, 0, 0])]),
    "ragged trees": make_trees([(6, [-1, -1]), (0, []), (2, [-1, -1, 1, 1]), (9, [-1, 0, -1])]),
    "trees of equally many nodes": make_trees([(6, [-1, -1, 0]), (0, [-1, 0, 1]), (3, [-1, -1, -1])]),
    "anchors alone": make_trees([(6, []), (0, []), (3, [])]),
    "trees and prompts": make_trees([(6, [-1, -1]), (3, [-1, -1, 0, 1])], [(0, 4), (5, 6)]),
    "a tree and a long prompt": make_trees([(2, [-1, -1, 1])], [(0, 30)]),
    # Of the long ones the last nodes are attended to apart, and see their way into those that are not.
    "a long tree": make_trees([(6, []), (0, [-1]), (2, BINARY[:29]), (9, [])], width=31),
    "long trees and prompts": make_trees(
        [(3, BINARY[:24]), (0, []), (5, []), (2, []), (7, [-1] * 27)], [(0, 4), (5, 6)], width=31
    ),
}


@pytest.mark.parametrize("extras", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("name", TREES)
def test_a_node_attends_to_the_way_that_leads_to_it(name: str, extras: dict[str, Any], poisoned_memory: None) -> None:
    packed = TREES[name]
    query, key, value = random_states(packed)
    call = PackedAttention(packed)
    out, _ = call(nn.Module(), query, key, value, None, scaling=0.3, **extras)
    tails = [first for first, *_ in call.grouped.pieces if first < packed.start[packed.decoding]]
    assert bool(tails) == (name in ("a long tree", "long trees and prompts"))
    assert torch.allclose(out[0], along_the_way(packed, query, key, value, extras), rtol=ULPS, atol=ULPS)


def along_the_way(
    packed: Packed, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, extras: dict[str, Any]
) -> torch.Tensor:
    """Returns what each query gathers in a text of its own: what was read before, and the way to its node."""
    rows = []
    assert packed.ancestors is not None
    for row, (slot, cell) in enumerate(zip(packed.slot.tolist(), packed.cell.tolist(), strict=True)):
        cells = list(range(cell + 1))
        if row < len(packed.ancestors):
            anchor = cell - int(packed.node[row]) - 1
            seen = packed.ancestors[row].nonzero()[:, 0].tolist()
            cells = [*range(anchor), *(anchor + place for place in seen)]
        text = [x[slot][:, cells] for x in (key, value)]
        rows.append(attend(query[0, :, row], *text, range(len(cells)), 0.3, **extras))
    return torch.stack(rows)


@pytest.mark.parametrize("extras", ["plain", "both"])
@pytest.mark.parametrize("path", ["reference", "triton", "by the kernels' reference"])
@pytest.mark.parametrize("packed", TREES.values(), ids=TREES)
def test_every_path_knows_trees(
    packed: Packed, path: str, extras: str, monkeypatch: pytest.MonkeyPatch, poisoned_memory: None
) -> None:
    device = prepare(path, monkeypatch)
    states = random_states(packed)
    more = {k: x.float().to(device) if isinstance(x, torch.Tensor) else x for k, x in EXTRAS[extras].items()}
    call = PackedAttention(packed.to(device), path)
    out, _ = call(nn.Module(), *(x.float().to(device) for x in states), None, scaling=0.3, **more)
    expected = along_the_way(packed, *states, EXTRAS[extras])
    assert torch.allclose(out[0].double().cpu(), expected, rtol=0, atol=SINGLE)


@pytest.mark.parametrize("name", ["trees and prompts", "long trees and prompts"])
def test_kernels_attend_to_trees_and_prompts_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, calls = TREES[name], []

    def spy(*layout: Any, path: str, ancestors: torch.Tensor | None = None, **others: Any) -> torch.Tensor:
        calls.append((len(layout[0]), layout[3].tolist(), layout[6], ancestors is not None))
        return ragged_attention(*layout, path="reference", ancestors=ancestors, **others)

    monkeypatch.setattr(ragged, "packed_attention", spy)
    states = random_states(packed)
    out, _ = PackedAttention(packed, "fused")(nn.Module(), *states, None, scaling=0.3)
    assert torch.allclose(out[0], along_the_way(packed, *states, {}), rtol=ULPS, atol=ULPS)
    start = packed.start.tolist()[: packed.decoding + 1]
    assert calls == [(start[-1], start, packed.width, True), (10, [0, 4, 10], 10, False)]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_trees_beside_any_prompts(data: st.DataObject) -> None:
    trees = []
    for _ in range(data.draw(st.integers(1, 4), "trees")):
        nodes = data.draw(st.integers(0, 7), "nodes")
        trees.append((data.draw(st.integers(0, 6)), [data.draw(st.integers(-1, node - 1)) for node in range(nodes)]))
    prompts = data.draw(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), max_size=2), "prompts")
    packed = make_trees(trees, prompts, width=8)
    states = random_states(packed)
    expected = along_the_way(packed, *states, {})
    out, _ = PackedAttention(packed)(nn.Module(), *states, None, scaling=0.3)
    assert torch.allclose(out[0], expected, rtol=ULPS, atol=ULPS)


@pytest.mark.parametrize("name", TREES)
def test_a_window_in_a_row_of_trees_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="ancestors and window=4"):
        PackedAttention(TREES[name])(nn.Module(), *random_states(TREES[name]), None, sliding_window=4)


def test_layers_with_and_without_a_window_share_a_row() -> None:
    packed = ROWS["long requests and prompts"]
    query, key, value = random_states(packed)
    shared = PackedAttention(packed)
    for window in (4, None, 2, 4):
        out, _ = shared(nn.Module(), query, key, value, None, sliding_window=window)
        alone, _ = PackedAttention(packed)(nn.Module(), query, key, value, None, sliding_window=window)
        assert torch.equal(out, alone)


def test_scores_are_scaled_by_the_head_size_when_nothing_is_said() -> None:
    query, key, value = random_states(ROWS["ragged requests"])
    call = PackedAttention(ROWS["ragged requests"])
    said, _ = call(nn.Module(), query, key, value, None, scaling=DIM**-0.5)
    assert torch.equal(call(nn.Module(), query, key, value, None)[0], said)


@pytest.mark.parametrize(
    ("keyword", "value"), [("sinks", torch.ones(4)), ("dropout", 0.1), ("output_attentions", True), ("brand_new", True)]
)
def test_a_keyword_that_is_not_handled_is_refused_by_name(keyword: str, value: object) -> None:
    query, key, states = random_states(ROWS["one request"])
    with pytest.raises(ValueError, match=f"{keyword}.*Generate without dcut"):
        PackedAttention(ROWS["one request"])(nn.Module(), query, key, states, None, **{keyword: value})


def test_keywords_that_ask_for_nothing_pass() -> None:
    query, key, value = random_states(ROWS["one request"])
    neutral = {"softcap": None, "s_aux": None, "dropout": 0.0, "position_ids": torch.zeros(1), "use_cache": True}
    neutral["output_attentions"] = False
    PackedAttention(ROWS["one request"])(nn.Module(), query, key, value, None, **neutral)


def test_plain_forwards_of_other_threads_stay_plain(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    model, tokens = tiny_llama(), torch.arange(3, 12)[None]

    @torch.no_grad()
    def plain() -> torch.Tensor:
        return model(tokens).logits

    expected = plain()
    with ThreadPoolExecutor(1) as other, packed_attention(ROWS["one prompt"]):
        assert torch.equal(other.submit(plain).result(), expected)


def test_after_a_packed_forward_attention_is_plain_again(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    model, tokens = tiny_llama(), torch.arange(3, 12)[None]
    with torch.no_grad():
        expected = model(tokens).logits
        with pytest.raises(RuntimeError, match="inside"), packed_attention(ROWS["one prompt"]):
            raise RuntimeError("inside")
        assert torch.equal(model(tokens).logits, expected)


def test_lookups_can_be_given_back() -> None:
    ours = AttentionInterface.get_interface
    attention.disable()
    try:
        assert AttentionInterface.get_interface.__module__.startswith("transformers")
    finally:
        attention.enable()
    assert AttentionInterface.get_interface is ours
