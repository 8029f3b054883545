"""The verdict against a loop that decodes token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcut.acceptance import accept
from hf_dcut.types import Packed


def make_row(drafts: Sequence[Sequence[int]], prompts: Sequence[tuple[int, bool]] = (), depth: int = 0) -> Packed:
    """Returns a packed row of requests with these drafts, then of prompt pieces (tokens, whether the prompt ends)."""
    sizes = [len(row) + 1 for row in drafts] + [size for size, _ in prompts]
    token = [t for row in drafts for t in (0, *row)] + [0] * sum(size for size, _ in prompts)
    start = [0]
    for size in sizes:
        start.append(start[-1] + size)
    wanted = list(range(start[len(drafts)]))
    wanted += [start[len(drafts) + i + 1] - 1 for i, (_, last) in enumerate(prompts) if last]
    slot = [i for i, size in enumerate(sizes) for _ in range(size)]
    unused = torch.zeros(len(token), dtype=torch.int64)
    return Packed(
        token=torch.tensor(token, dtype=torch.int64),
        slot=torch.tensor(slot, dtype=torch.int64),
        cell=unused,
        position=unused,
        node=unused,
        start=torch.tensor(start, dtype=torch.int32),
        used=torch.zeros(len(sizes), dtype=torch.int32),
        logit_rows=torch.tensor(wanted, dtype=torch.int64),
        decoding=len(drafts),
        slots=len(sizes),
        reach=0,
        width=max([depth, *map(len, drafts)], default=0) + 1,
    )


def chosen(*token: int) -> torch.Tensor:
    return torch.tensor(token, dtype=torch.int64)


def test_stops_at_the_first_draft_the_target_does_not_choose() -> None:
    packed = make_row([[1, 2, 3], [1, 2, 3], [], [1]])
    verdict = accept(chosen(1, 2, 3, 4, 1, 4, 3, 4, 2, 3, 0), packed)
    assert verdict.accepted.tolist() == [3, 1, 0, 0]
    assert verdict.next.tolist() == [4, 4, 2, 3]
    assert verdict.path.tolist() == [[0, 1, 2, 3], [4, 5, -1, -1], [8, -1, -1, -1], [9, -1, -1, -1]]


def test_prompts_get_their_first_token_once_they_are_read() -> None:
    packed = make_row([[1]], prompts=[(3, True), (2, False)])
    verdict = accept(chosen(1, 2, 4), packed)
    assert verdict.accepted.tolist() == [1, 0, 0]
    assert verdict.next.tolist() == [2, 4, -1]
    assert verdict.path.tolist() == [[0, 1]], "prompts have no path"


def test_prompts_alone() -> None:
    verdict = accept(chosen(3), make_row([], prompts=[(4, True)]))
    assert (verdict.accepted.tolist(), verdict.next.tolist()) == ([0], [3])
    assert verdict.path.shape[0] == 0


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_equals_a_loop(data: st.DataObject) -> None:
    token = st.integers(0, 1)  # so few that drafts often agree
    drafts = data.draw(st.lists(st.lists(token, max_size=5), max_size=5), "drafts")
    prompts = data.draw(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=2), "prompts")
    packed = make_row(drafts, prompts, depth=5)
    rows = packed.logit_rows.tolist()
    if not rows:
        return
    choice = dict(zip(rows, data.draw(st.lists(token, min_size=len(rows), max_size=len(rows)), "choice"), strict=True))
    verdict = accept(chosen(*choice.values()), packed)
    accepted, following, paths, row = [], [], [], 0
    for own in drafts:
        path = [row]
        for draft in own:
            if choice[path[-1]] != draft:
                break
            path.append(path[-1] + 1)
        accepted.append(len(path) - 1)
        following.append(choice[path[-1]])
        paths.append(path + [-1] * (6 - len(path)))
        row += len(own) + 1
    for size, last in prompts:
        row += size
        accepted.append(0)
        following.append(choice[row - 1] if last else -1)
    assert verdict.accepted.tolist() == accepted
    assert verdict.next.tolist() == following
    assert verdict.path.tolist() == paths


def test_rows_that_were_not_looked_at_are_not_accepted() -> None:
    verdict = accept(chosen(1, 4, -1, -1), make_row([[1, 2, 3]]))
    assert (verdict.accepted.tolist(), verdict.next.tolist()) == ([1], [4])


# Trees.


def make_trees(
    drafts: Sequence[Sequence[int]],
    parent: Sequence[Sequence[int]],
    prompts: Sequence[tuple[int, bool]] = (),
    depth: int = 0,
) -> Packed:
    """Returns a row of trees whose nodes follow these, -1 the anchor, then of prompt pieces."""
    packed = make_row(drafts, prompts, depth)
    ancestors = torch.zeros(sum(len(own) + 1 for own in drafts), packed.width, dtype=torch.bool)
    row = 0
    for own in parent:
        for node in range(-1, len(own)):
            while node >= 0:
                ancestors[row, node + 1] = True
                node = own[node]
            ancestors[row, 0] = True
            row += 1
    return replace(packed, ancestors=ancestors)


#  anchor ── 1 ── 3 ── 5      nodes 0, 2, 4
#         └─ 2 ── 3           nodes 1, 3
TOKENS, PARENT = [1, 2, 3, 3, 5], [-1, -1, 0, 1, 2]


def judged(*choice: int) -> tuple[list[int], int, list[int]]:
    """Returns what is accepted of the tree above, and packed rows, when the target chooses this behind each row."""
    verdict = accept(chosen(*choice), make_trees([TOKENS], [PARENT]))
    (path,) = verdict.path.tolist()
    assert verdict.accepted.tolist() == [sum(row >= 0 for row in path) - 1]
    return [TOKENS[row - 1] for row in path if row > 0], int(verdict.next), path


def test_the_path_of_a_tree_is_where_the_target_goes() -> None:
    # Behind the anchor, 1, 2, 1 3, 2 3, 1 3 5.
    assert judged(1, 3, 9, 5, 9, 7) == ([1, 3, 5], 7, [0, 1, 3, 5, -1, -1])
    assert judged(2, 9, 3, 9, 8, 9) == ([2, 3], 8, [0, 2, 4, -1, -1, -1])
    assert judged(1, 3, 9, 6, 9, 9) == ([1, 3], 6, [0, 1, 3, -1, -1, -1])
    assert judged(2, 3, 4, 5, 9, 9) == ([2], 4, [0, 2, -1, -1, -1, -1]), "the other branch is not looked at"
    assert judged(4, 3, 3, 5, 3, 3) == ([], 4, [0, -1, -1, -1, -1, -1])


def test_a_sibling_that_is_proposed_twice_counts_once() -> None:
    verdict = accept(chosen(1, 7, 8, 9), make_trees([[1, 1, 1]], [[-1, -1, -1]]))
    assert (verdict.accepted.tolist(), verdict.next.tolist()) == ([1], [7])
    assert verdict.path.tolist() == [[0, 1, -1, -1]], "the first"


def test_trees_of_several_sizes_and_prompts() -> None:
    packed = make_trees([[1, 2], [], [1, 2, 3]], [[-1, -1], [], [-1, -1, 1]], [(2, True), (3, False)], depth=4)
    verdict = accept(chosen(2, 0, 6, 7, 2, 0, 3, 8, 9), packed)
    assert verdict.accepted.tolist() == [1, 0, 2, 0, 0]
    assert verdict.next.tolist() == [6, 7, 8, 9, -1]
    assert verdict.path.tolist() == [[0, 2, -1, -1, -1], [3, -1, -1, -1, -1], [4, 6, 7, -1, -1]]


def test_a_node_behind_a_row_that_was_not_looked_at_is_not_accepted() -> None:
    verdict = accept(chosen(2, -1, -1), make_trees([[1, 2]], [[-1, -1]]))
    assert (verdict.accepted.tolist(), verdict.next.tolist()) == ([1], [-1])


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_trees_equal_a_loop(data: st.DataObject) -> None:
    drafts, parent = [], []
    for _ in range(data.draw(st.integers(1, 4), "requests")):
        # Children of a node differ; tokens are so few that the target often agrees.
        children: dict[int, set[int]] = {}
        own: list[int] = []
        before: list[int] = []
        for node in range(data.draw(st.integers(0, 7), "nodes")):
            free = [n for n in range(-1, node) if len(children.get(n, ())) < 3]
            before.append(data.draw(st.sampled_from(free), "parent"))
            taken = children.setdefault(before[-1], set())
            own.append(data.draw(st.sampled_from(sorted({0, 1, 2} - taken)), "token"))
            taken.add(own[-1])
        drafts.append(own)
        parent.append(before)
    prompts = data.draw(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=2), "prompts")
    packed = make_trees(drafts, parent, prompts, depth=7)
    rows = packed.logit_rows.tolist()
    choice = dict(
        zip(rows, data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows))), strict=True)
    )
    verdict = accept(chosen(*choice.values()), packed)
    row = 0
    for index, (own, before) in enumerate(zip(drafts, parent, strict=True)):
        node, path = -1, [row]
        while node is not None:
            said = choice[row + 1 + node]
            node = next((n for n in range(len(own)) if before[n] == node and own[n] == said), None)  # type: ignore[assignment]
            path += [] if node is None else [row + 1 + node]
        assert verdict.accepted[index] == len(path) - 1
        assert verdict.next[index] == said
        assert verdict.path[index].tolist() == path + [-1] * (8 - len(path))
        row += len(own) + 1
    for index, (size, last) in enumerate(prompts, start=len(drafts)):
        row += size
        assert verdict.accepted[index] == 0
        assert verdict.next[index] == (choice[row - 1] if last else -1)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_a_tree_that_is_a_chain_is_judged_as_one(data: st.DataObject) -> None:
    token = st.integers(0, 1)
    drafts = data.draw(st.lists(st.lists(token, max_size=5), min_size=1, max_size=5), "drafts")
    chains = make_row(drafts, [(2, True)], depth=5)
    trees = make_trees(drafts, [list(range(-1, len(own) - 1)) for own in drafts], [(2, True)], depth=5)
    count = len(chains.logit_rows)
    choice = chosen(*data.draw(st.lists(token, min_size=count, max_size=count), "choice"))
    one, other = accept(choice, chains), accept(choice, trees)
    assert torch.equal(one.accepted, other.accepted)
    assert torch.equal(one.next, other.next)
    assert torch.equal(one.path, other.path)
