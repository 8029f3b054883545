"""Trees: who comes before whom, and where a node stands in its text; by hand and against a walk from node to node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcut.branching import ancestors_of, branch, parents
from hf_dcut.packing import Chunk, join, pack
from hf_dcut.types import Batch, Cut, Drafts, Packed


def way(parent: Sequence[int], node: int) -> list[int]:
    """Returns the nodes from the first one to this one."""
    steps = [node]
    while 0 <= parent[steps[0]] < steps[0]:
        steps.insert(0, parent[steps[0]])
    return steps


def walked(parent: Sequence[int]) -> list[list[bool]]:
    """Returns which nodes lead to each."""
    return [[other in way(parent, node) for other in range(len(parent))] for node in range(len(parent))]


def table(*rows: str) -> list[list[bool]]:
    """Returns the same, of rows such as "x.x"."""
    return [[mark == "x" for mark in row] for row in rows]


# Who comes before whom.


def test_the_example_of_the_module() -> None:
    found = ancestors_of(torch.tensor([[-1, -1, 0, 0]]))
    assert found.dtype == torch.bool
    assert found[0].tolist() == table("x...", ".x..", "x.x.", "x..x")


def test_each_row_has_a_tree_of_its_own() -> None:
    found = ancestors_of(torch.tensor([[-1, 0, 1], [-1, -1, -1], [-1, 0, 0]]))
    assert found[0].tolist() == table("x..", "xx.", "xxx")
    assert found[1].tolist() == table("x..", ".x.", "..x")
    assert found[2].tolist() == table("x..", "xx.", "x.x")


def test_a_chain_is_a_triangle() -> None:
    for depth in range(10):
        chain = Drafts.chain(torch.zeros(2, depth, dtype=torch.int64), torch.ones(2, depth))
        assert parents(chain).tolist() == [list(range(-1, depth - 1))] * 2
        expected = torch.ones(depth, depth, dtype=torch.bool).tril().expand(2, depth, depth)
        assert torch.equal(ancestors_of(parents(chain)), expected)


def test_a_tree_says_its_parents_itself() -> None:
    parent = torch.tensor([[-1, -1, 0]])
    drafts = Drafts(torch.tensor([[5, 6, 7]]), torch.tensor([3]), torch.ones(1, 3), parent)
    assert parents(drafts) is parent


def test_a_parent_that_is_not_before_its_node_is_the_anchor() -> None:
    anchor = ancestors_of(torch.tensor([[-1, -1, 0, -1]]))
    for first, last in ((-9, -5), (0, 3), (3, 7), (1, 99)):
        assert torch.equal(ancestors_of(torch.tensor([[first, -1, 0, last]])), anchor)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_equals_a_walk(data: st.DataObject) -> None:
    nodes = data.draw(st.integers(0, 17), "nodes")
    # Mostly long ways, and some parents that are none.
    one = [st.one_of(st.integers(-1, node + 1), st.just(node - 1)) for node in range(nodes)]
    rows = [[data.draw(parent) for parent in one] for _ in range(2)]
    found = ancestors_of(torch.tensor(rows, dtype=torch.int64).view(2, nodes))
    assert found.tolist() == [walked(row) for row in rows]


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_first_nodes_are_a_tree_of_their_own(data: st.DataObject) -> None:
    parent = torch.tensor([[data.draw(st.integers(-1, node - 1)) for node in range(9)]])
    for depth in range(10):
        assert torch.equal(ancestors_of(parent[:, :depth]), ancestors_of(parent)[:, :depth, :depth])


# The packed row.


def make_row(batch: Batch, parent: Sequence[Sequence[int]], kept: Sequence[int]) -> Packed:
    """Returns the row of trees of nodes 100, 101, .., then 200, .. of which so many are kept."""
    nodes = torch.tensor(parent)
    token = 100 * torch.arange(1, len(nodes) + 1)[:, None] + torch.arange(nodes.shape[1])
    keep = torch.arange(nodes.shape[1]) < torch.tensor(kept)[:, None]
    cut = Cut(keep, len(kept) + sum(kept), 0.5, tuple(kept))
    return branch(pack(Drafts.chain(token, torch.ones(token.shape)), cut, batch, reach=40), nodes)


def test_positions_of_the_example(make_batch: Callable[..., Batch]) -> None:
    packed = make_row(make_batch([5]), [[-1, -1, 0, 0]], [4])
    assert packed.cell.tolist() == [5, 6, 7, 8, 9], "where K/V go does not change"
    assert packed.position.tolist() == packed.text_cells().tolist() == [5, 6, 6, 7, 7]
    assert packed.ancestors is not None
    assert packed.ancestors.tolist() == table("x....", "xx...", "x.x..", "xx.x.", "xx..x")


def test_several_requests_keep_first_nodes(make_batch: Callable[..., Batch]) -> None:
    """Of positions that lie ahead of their cells, as behind an image."""
    batch = make_batch([4, 7, 2], rope=[0, 0, 5])
    packed = make_row(batch, [[-1, 0, -1], [-1, 0, 1], [-1, -1, 1]], [3, 0, 2])
    assert packed.token.tolist() == [50, 100, 101, 102, 51, 52, 300, 301]
    assert packed.cell.tolist() == [4, 5, 6, 7, 7, 2, 3, 4]
    assert packed.text_cells().tolist() == [4, 5, 6, 5, 7, 2, 3, 3]
    assert packed.position.tolist() == [4, 5, 6, 5, 7, 7, 8, 8]
    assert packed.ancestors is not None
    assert packed.ancestors.tolist() == table("x...", "xx..", "xxx.", "x..x", "x...", "x...", "xx..", "x.x.")


def test_positions_of_three_kinds_move_together(make_batch: Callable[..., Batch]) -> None:
    batch, parent = make_batch([5]), torch.tensor([[-1, -1, 0, 0]])
    drafts = Drafts.chain(torch.tensor([[1, 2, 3, 4]]), torch.ones(1, 4))
    chain = pack(drafts, Cut(torch.ones(1, 4).bool(), 5, 1.0, (4,)), batch, reach=40)
    offset = torch.tensor([[0], [10], [30]])
    packed = branch(replace(chain, position=chain.position + offset), parent)
    assert torch.equal(packed.position, torch.tensor([5, 6, 6, 7, 7]) + offset)


def test_prompts_behind_trees_keep_their_cells(make_batch: Callable[..., Batch]) -> None:
    trees = make_row(make_batch([4, 7]), [[-1, -1], [-1, 0]], [2, 1])
    packed = join(trees, [Chunk(torch.tensor([7, 8, 9]), slot=2, first=3, rope=2, last=True)])
    assert packed.text_cells().tolist() == [4, 5, 5, 7, 8, 3, 4, 5]
    assert packed.position.tolist() == [4, 5, 5, 7, 8, 5, 6, 7]
    assert packed.ancestors is not None
    assert len(packed.ancestors) == 5, "of the rows that decode"


def test_the_text_of_a_chain_lies_in_its_cells(make_batch: Callable[..., Batch]) -> None:
    packed = pack(
        Drafts.chain(torch.tensor([[1, 2]]), torch.ones(1, 2)),
        Cut(torch.ones(1, 2).bool(), 3, 1.0, (2,)),
        make_batch([5]),
        reach=9,
    )
    assert packed.text_cells() is packed.cell
    tree = branch(packed, torch.tensor([[-1, 0]]))
    assert torch.equal(tree.text_cells(), packed.cell)
    assert torch.equal(tree.position, packed.position)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_equals_a_loop_over_nodes(make_batch: Callable[..., Batch], data: st.DataObject) -> None:
    rows, nodes = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    parent = [[data.draw(st.integers(-1, node - 1)) for node in range(nodes)] for _ in range(rows)]
    numbers = st.lists(st.integers(0, 20), min_size=rows, max_size=rows)
    length, rope = data.draw(numbers), data.draw(numbers)
    kept = data.draw(st.lists(st.integers(0, nodes), min_size=rows, max_size=rows))
    packed = make_row(make_batch(length, rope=rope), parent, kept)
    text, seen = [], []
    for row in range(rows):
        for node in range(-1, kept[row]):
            before = way(parent[row], node) if node >= 0 else []
            text.append(length[row] + len(before))
            seen.append([True, *(other in before for other in range(nodes))])
    assert packed.text_cells().tolist() == text
    assert packed.position.tolist() == [
        cell + rope[slot] for cell, slot in zip(text, packed.slot.tolist(), strict=True)
    ]
    assert packed.ancestors is not None
    assert packed.ancestors.tolist() == seen
