"""The verdict against a loop that decodes token by token."""

from __future__ import annotations

from collections.abc import Sequence

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
