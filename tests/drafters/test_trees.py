"""Trees against the enumeration of all paths: the likeliest of a block, and the union of several drafters' drafts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from hf_dcut.branching import parents
from hf_dcut.drafters.base import Drafter
from hf_dcut.drafters.best_of import BestOf
from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.drafters.prompt_lookup import PromptLookupDrafter
from hf_dcut.drafters.trees import grow, merge
from hf_dcut.drafters.wrapping import Wrapped
from hf_dcut.types import Batch, Drafts

# Products of few float32, and survivals handed on as quotients.
ROUNDING = 1e-5

Path = tuple[int, ...]


def paths_of(drafts: Drafts, row: int, count: int | None = None) -> dict[Path, float]:
    """Returns the survival of each path in the first nodes of a row, all that are real by default, in their order."""
    token, parent = drafts.token[row].tolist(), parents(drafts)[row].tolist()
    survival = drafts.confidence[row].double().cumprod(0).tolist()
    paths: list[Path] = []
    for node in range(int(drafts.count[row]) if count is None else count):
        assert -1 <= parent[node] < node, "a parent stands before its children"
        paths.append((*(paths[parent[node]] if parent[node] >= 0 else ()), token[node]))
    assert len(set(paths)) == len(paths), "siblings differ"
    return dict(zip(paths, survival, strict=False))


def check_order(drafts: Drafts) -> None:
    """Asserts what selection relies on: no survival rises along a row."""
    assert drafts.parent is not None
    assert drafts.confidence.dtype == torch.float32
    assert ((drafts.confidence >= 0) & (drafts.confidence <= 1)).all()


def check_best(found: Mapping[Path, float], every: Mapping[Path, float], nodes: int) -> None:
    """Asserts that some paths are as many of all as asked for, the likeliest ones, with their survivals."""
    best = sorted(every.values(), reverse=True)[:nodes]
    assert list(found.values()) == pytest.approx(best, rel=ROUNDING, abs=1e-30)
    for path, survival in found.items():
        assert survival == pytest.approx(every[path], rel=ROUNDING, abs=1e-30)


# The likeliest paths of a block.


def test_by_hand() -> None:
    token = torch.tensor([[[5, 6], [7, 8], [9, 3]]])
    probability = torch.tensor([[[0.6, 0.4], [0.9, 0.1], [0.5, 0.25]]])
    # 5: 0.6, 5 7: 0.54, 6: 0.4, 6 7: 0.36, 5 7 9: 0.27, ..
    drafts = grow(token, probability, 3)
    assert drafts.token.tolist() == [[5, 7, 6]]
    assert parents(drafts).tolist() == [[-1, 0, -1]]
    assert drafts.count.tolist() == [3]
    assert drafts.confidence[0].tolist() == pytest.approx([0.6, 0.9, 0.4 / 0.54])


def test_a_sure_block_is_a_chain() -> None:
    token = torch.tensor([[[5, 6], [7, 8], [9, 3]]])
    probability = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]])
    drafts = grow(token, probability, 3)
    assert (drafts.token.tolist(), parents(drafts).tolist()) == ([[5, 7, 9]], [[-1, 0, 1]])
    assert drafts.confidence.tolist() == [[1.0] * 3]


def test_an_unsure_block_is_broad() -> None:
    drafts = grow(torch.tensor([[[5, 6, 7], [1, 2, 3], [1, 2, 3]]]), torch.full((1, 3, 3), 0.1), 3)
    assert (drafts.token.tolist(), parents(drafts).tolist()) == ([[5, 6, 7]], [[-1] * 3])


def test_one_candidate_a_place_is_a_chain() -> None:
    token, probability = torch.arange(8).view(2, 4, 1), torch.rand(2, 4, 1)
    drafts = grow(token, probability, 4)
    assert torch.equal(drafts.token, token[..., 0])
    assert parents(drafts).tolist() == [[-1, 0, 1, 2]] * 2
    torch.testing.assert_close(drafts.confidence, probability[..., 0])


PROBABILITIES = st.one_of(st.floats(0, 1, width=32), st.sampled_from([0.0, 0.25, 0.5, 1.0]))


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_they_are_the_likeliest_of_all(data: st.DataObject) -> None:
    rows, depth, width = (data.draw(st.integers(1, most)) for most in (3, 4, 3))
    nodes = data.draw(st.integers(1, depth))
    flat = data.draw(st.lists(PROBABILITIES, min_size=rows * depth * width, max_size=rows * depth * width))
    # Too small ones would be denormal in a product, whose quotients say nothing.
    probability = torch.tensor([0.0 if p < 1e-6 else p for p in flat]).view(rows, depth, width)
    places = [data.draw(st.permutations(range(4))) for _ in range(rows * depth)]
    token = torch.tensor(places)[:, :width].reshape(rows, depth, width)
    drafts = grow(token, probability, nodes)
    check_order(drafts)
    assert drafts.count.tolist() == [nodes] * rows
    assert drafts.token.shape == parents(drafts).shape == (rows, nodes)
    for row in range(rows):
        every: dict[Path, float] = {}
        for length in range(1, depth + 1):
            for chosen in product(range(width), repeat=length):
                path = tuple(int(token[row, k, place]) for k, place in enumerate(chosen))
                every[path] = math.prod(float(probability[row, k, place]) for k, place in enumerate(chosen))
        check_best(paths_of(drafts, row), every, nodes)


def test_what_is_no_number_is_told() -> None:
    probability = torch.tensor([[[0.5, 0.2], [math.nan, math.nan], [0.5, 0.2]], [[0.5, 0.2]] * 3])
    drafts = grow(torch.tensor([5, 6]).expand(2, 3, 2), probability, 3)
    assert drafts.confidence.isfinite().all(1).tolist() == [False, True]
    assert drafts.count.tolist() == [3, 3]


# One tree of several drafts.


def chain(token: Sequence[int], confidence: Sequence[float], count: int | None = None) -> Drafts:
    """Returns one request's chain, of which the first `count` drafts are real."""
    real = None if count is None else torch.tensor([count])
    return Drafts.chain(torch.tensor([token]), torch.tensor([confidence]), real)


def test_chains_share_their_beginning() -> None:
    # Survivals: 5: 0.8, 5 6: 0.4, 5 6 7: 0.2, and 5: 0.9, 5 8: 0.63, 5 8 7: 0.063.
    drafts = merge([chain([5, 6, 7], [0.8, 0.5, 0.5]), chain([5, 8, 7], [0.9, 0.7, 0.1])], 4)
    assert drafts.token.tolist() == [[5, 8, 6, 7]]
    assert parents(drafts).tolist() == [[-1, 0, 0, 2]], "the first one's 6 follows the other's 5, which is surer"
    assert drafts.count.tolist() == [4]
    assert drafts.confidence[0].tolist() == pytest.approx([0.9, 0.7, 0.4 / 0.63, 0.2 / 0.4])


def test_the_same_drafts_count_once() -> None:
    one = chain([5, 6, 7], [0.8, 0.5, 0.5])
    drafts = merge([one, one, one], 3)
    assert drafts.count.tolist() == [3]
    assert drafts.token.tolist() == [[5, 6, 7]]
    assert parents(drafts).tolist() == [[-1, 0, 1]]
    torch.testing.assert_close(drafts.confidence, one.confidence)


def test_fewer_paths_than_nodes() -> None:
    drafts = merge([chain([5, 6, 7], [0.8, 0.5, 0.5]), chain([5, 6], [0.9, 0.9])], 5)
    assert drafts.count.tolist() == [3]
    assert list(paths_of(drafts, 0)) == [(5,), (5, 6), (5, 6, 7)]


def test_the_same_token_elsewhere_is_another_node() -> None:
    drafts = merge([chain([5, 5, 5], [0.9, 0.9, 0.9]), chain([6, 5, 5], [0.8, 0.9, 0.9])], 6)
    assert set(paths_of(drafts, 0)) == {(5,), (5, 5), (5, 5, 5), (6,), (6, 5), (6, 5, 5)}


@pytest.mark.parametrize("behind", [1.0, math.nan, math.inf])
def test_what_stands_behind_the_last_draft_is_not_taken(behind: float) -> None:
    drafts = merge([chain([5, 6, 7], [0.5, behind, behind], 1), chain([8, 5, 6], [0.4, 0.5, behind], 2)], 3)
    assert drafts.count.tolist() == [3]
    assert list(paths_of(drafts, 0)) == [(5,), (8,), (8, 5)]
    assert drafts.confidence.isfinite().all()
    nobody = merge([chain([5, 6], [behind, behind], 0), chain([5, 6], [behind, behind], 0)], 2)
    assert nobody.count.tolist() == [0]


def test_what_is_no_number_in_one_of_them_is_told() -> None:
    drafts = merge([chain([5, 6], [0.5, math.nan]), chain([5, 7], [0.6, 0.7])], 2)
    assert not drafts.confidence.isfinite().all()


@st.composite
def offers(draw: st.DrawFn) -> Drafts:
    """Returns two requests' chains or trees, of few tokens, so that they often have paths in common."""
    nodes = draw(st.integers(1, 4))
    half = st.sampled_from([1.0, 0.75, 0.5, 0.25])
    token, parent = [], []
    for _ in range(2):
        said: dict[Path, int] = {}
        before: list[int] = []
        for node in range(nodes):
            free = [
                ((*path, token), index)
                for path, index in {(): -1, **said}.items()
                for token in range(2)
                if (*path, token) not in said
            ]
            path, index = draw(st.sampled_from(free))
            said[path] = node
            before.append(index)
        token.append([path[-1] for path in said])
        parent.append(before)
    numbers = torch.tensor([[draw(half) for _ in range(nodes)] for _ in range(2)])
    count = torch.tensor([draw(st.integers(0, nodes)) for _ in range(2)])
    if draw(st.booleans()):
        return Drafts.chain(torch.tensor(token), numbers, count)
    return Drafts(torch.tensor(token), count, numbers, torch.tensor(parent))


@settings(deadline=None, max_examples=300)
@given(st.lists(offers(), min_size=1, max_size=3), st.integers(1, 9))
def test_it_is_the_union_of_all_paths(given: list[Drafts], nodes: int) -> None:
    drafts = merge(given, nodes)
    check_order(drafts)
    for row in range(2):
        every: dict[Path, float] = {}
        for offer in given:
            for path, survival in paths_of(offer, row).items():
                every[path] = max(every.get(path, 0.0), survival)
        found = paths_of(drafts, row)
        check_best(found, every, nodes)
        assert len(found) == min(nodes, len(every))


@settings(deadline=None, max_examples=50)
@given(st.lists(offers(), min_size=2, max_size=3))
def test_any_first_nodes_are_the_best_tree_of_so_many(given: list[Drafts]) -> None:
    whole = merge(given, 4)
    for nodes in range(1, whole.token.shape[1] + 1):
        less, part = merge(given, nodes), whole.first(nodes)
        for row in range(2):
            assert paths_of(part, row) == paths_of(less, row)


# Who proposes trees.


def test_drafters_say_whether_they_branch(
    model: PreTrainedModel, make_drafter: Callable[..., DFlashDrafter], stub_drafter: Callable[..., Drafter]
) -> None:
    block, lookup = make_drafter(model), PromptLookupDrafter(4)
    both = BestOf([lookup, lookup])
    found = [one.branches for one in (block, both, Wrapped(block, lambda d, _: d), lookup, stub_drafter(3))]
    assert found == [True, True, True, False, False]
    assert not Wrapped(lookup, lambda d, _: d).branches


def test_by_default_a_tree_is_a_chain(stub_drafter: Callable[..., Any]) -> None:
    drafts = chain([5, 6], [0.5, 0.5])
    stub = stub_drafter(2, lambda batch: drafts)
    assert stub.propose_tree(batch_of(1), 2) is drafts


def batch_of(rows: int) -> Batch:
    places = torch.arange(rows)
    return Batch(places, 0 * places, places + 5, 0 * places + 99, places, 0 * places)


@pytest.mark.parametrize("draft_ids", [None, list(range(3, 60))], ids=["all ids", "own ids"])
def test_the_tree_of_a_block_holds_its_likeliest_paths(
    model: PreTrainedModel, make_drafter: Callable[..., DFlashDrafter], draft_ids: list[int] | None
) -> None:
    options = {} if draft_ids is None else {"draft_ids": draft_ids}
    bound = make_drafter(model, **options).bind(model, 3, 20)
    logits, ids = bound.propose_logits(batch_of(3))
    drafts = bound.propose_tree(batch_of(3), 4)
    assert drafts.token.shape == (3, 4)
    check_order(drafts)
    probability, token = logits.detach().double().softmax(-1).topk(4)
    token = token if ids is None else ids[token]
    for row in range(3):
        every: dict[Path, float] = {}
        for length in range(1, 5):
            for places in product(range(4), repeat=length):
                path = tuple(int(token[row, k, place]) for k, place in enumerate(places))
                every[path] = math.prod(float(probability[row, k, place]) for k, place in enumerate(places))
        check_best(paths_of(drafts, row), every, 4)


def test_several_drafters_compete_for_a_place(model: PreTrainedModel, stub_drafter: Callable[..., Any]) -> None:
    first, second = chain([5, 6, 7], [0.8, 0.5, 0.5]), chain([5, 8], [0.9, 0.7])
    stubs = [stub_drafter(offer.token.shape[1], lambda batch, offer=offer: offer) for offer in (first, second)]
    drafts = BestOf(stubs).bind(model, 1, 20).propose_tree(batch_of(1), 3)
    expected = merge([first, second], 3)
    assert all(torch.equal(getattr(drafts, name), getattr(expected, name)) for name in ("token", "confidence", "count"))
    assert torch.equal(parents(drafts), parents(expected))


def test_a_change_is_made_to_trees_too(model: PreTrainedModel, stub_drafter: Callable[..., Any]) -> None:
    tree = merge([chain([5, 6], [0.8, 0.5]), chain([7, 8], [0.9, 0.7])], 4)
    stub = stub_drafter(4, lambda batch: tree)
    bound = Wrapped(stub, lambda drafts, batch: drafts.first(len(batch) + 1)).bind(model, 1, 20)
    drafts = bound.propose_tree(batch_of(1), 4)
    assert drafts.token.tolist() == tree.token[:, :2].tolist()
    assert drafts.count.tolist() == [2]
