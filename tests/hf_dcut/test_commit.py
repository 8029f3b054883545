"""What a verdict does to requests, and which rows are handed to the drafter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import StoppingCriteriaList

from hf_dcut.acceptance import accept
from hf_dcut.branching import branch
from hf_dcut.cache import LayerShape, SlotCache
from hf_dcut.commit import commit
from hf_dcut.requests import Request
from hf_dcut.types import Choice, Committed, Packed, Verdict

DEPTH = 3


def make_row(drafts: list[list[int]], length: list[int], prompts: list[list[int]] = ()) -> Packed:  # type: ignore[assignment]
    """Returns a packed row: requests in slots 0, 1, .. with so many cells used, then prompts read from their start."""
    rows = [[9, *own] for own in drafts] + list(prompts)
    begin = [*length, *([0] * len(prompts))]
    slot = [i for i, row in enumerate(rows) for _ in row]
    cell = [first + k for first, row in zip(begin, rows, strict=True) for k in range(len(row))]
    sizes = torch.tensor([0, *map(len, rows)])
    return Packed(
        token=torch.tensor([t for row in rows for t in row]),
        slot=torch.tensor(slot),
        cell=torch.tensor(cell),
        position=torch.tensor(cell) + 1000,
        node=torch.zeros(len(cell), dtype=torch.int64),
        start=sizes.cumsum(0).int(),
        used=torch.zeros(len(rows), dtype=torch.int32),
        logit_rows=torch.arange(len(cell)),
        decoding=len(drafts),
        slots=len(rows),
        reach=64,
        width=DEPTH + 1,
    )


def make_verdict(packed: Packed, accepted: list[int], following: list[int]) -> Verdict:
    start = packed.start.tolist()
    path = [[start[i] + k if k <= accepted[i] else -1 for k in range(packed.width)] for i in range(packed.decoding)]
    return Verdict(
        torch.tensor(accepted), torch.tensor(following), torch.tensor(path, dtype=torch.int64).view(-1, packed.width)
    )


def decoding_request(length: int, tokens: list[int], **options: object) -> Request:
    """Returns a request that has read its prompt and generated these tokens."""
    prompt = [1] * (length - len(tokens) + 1)
    options = {"max_new_tokens": 99} | options
    return Request(id=0, prompt=prompt, read=len(prompt), tokens=list(tokens), **options)  # type: ignore[arg-type]


@pytest.fixture
def cache() -> SlotCache:
    return SlotCache([LayerShape(1, 2, 1, 2)], slots=4, length=64, dtype=torch.float32, device="cpu")


def run_commit(
    verdict: Verdict, packed: Packed, taps: torch.Tensor | None, requests: list[Request], cache: SlotCache
) -> Committed:
    """Commits with logits row, row + 0.25 of each row, and processed scores twice as high."""
    logits = torch.arange(len(packed.logit_rows)).double()[:, None] + torch.tensor([0.0, 0.25])
    choice = Choice(torch.full((len(logits),), -1), 2 * logits.float())
    return commit(verdict, packed, choice, logits, taps, requests, cache)


def rows_of(committed: Committed) -> list[tuple[int, int, int, int]]:
    fields = (committed.slot, committed.cell, committed.position, committed.token)
    return list(zip(*(field.tolist() for field in fields), strict=True))


def test_accepted_drafts_and_the_targets_token_are_added(cache: SlotCache) -> None:
    requests = [decoding_request(4, [9]), decoding_request(7, [8, 9])]
    packed = make_row([[11, 12, 13], [21, 22]], length=[4, 7])
    taps = torch.arange(len(packed)).float()[:, None]
    committed = run_commit(make_verdict(packed, [2, 0], [50, 60]), packed, taps, requests, cache)
    assert [request.tokens for request in requests] == [[9, 11, 12, 50], [8, 9, 60]]
    assert rows_of(committed) == [(0, 4, 1004, 9), (0, 5, 1005, 11), (0, 6, 1006, 12), (1, 7, 1007, 9)]
    assert committed.taps is not None
    assert committed.taps.flatten().tolist() == [0, 1, 2, 4]
    assert (committed.kept, committed.accepted, committed.added) == ((3, 2), (2, 0), (3, 1))
    assert committed.finished == ()
    assert [request.length for request in requests] == [7, 8]
    assert [(r.totals.steps, r.totals.kept, r.totals.accepted) for r in requests] == [(1, 3, 2), (1, 2, 0)]


@pytest.mark.parametrize("offset", range(4))
def test_nothing_is_added_behind_an_end_token(cache: SlotCache, offset: int) -> None:
    block = [11, 12, 13, 14]
    request = decoding_request(4, [9], eos=frozenset({block[offset]}))
    packed = make_row([block[:3]], length=[4])
    committed = run_commit(make_verdict(packed, [3], [14]), packed, None, [request], cache)
    assert request.tokens == [9, *block[: offset + 1]]
    assert request.finish_reason == "eos"
    assert (committed.kept, committed.accepted, committed.added) == ((3,), (min(3, offset + 1),), (offset + 1,))
    assert committed.finished == (0,)


def test_nothing_is_added_beyond_the_length(cache: SlotCache) -> None:
    request = decoding_request(4, [9], max_new_tokens=3)
    packed = make_row([[11, 12, 13]], length=[4])
    committed = run_commit(make_verdict(packed, [3], [14]), packed, None, [request], cache)
    assert (request.tokens, request.finish_reason, committed.added) == ([9, 11, 12], "length", (2,))


def test_prompts_are_read_in_pieces(cache: SlotCache) -> None:
    partly, whole = (Request(id=i, prompt=[1, 2, 3, 4], max_new_tokens=9) for i in range(2))
    packed = make_row([], length=[], prompts=[[1, 2, 3], [1, 2, 3, 4]])
    committed = run_commit(make_verdict(packed, [0, 0], [-1, 70]), packed, None, [partly, whole], cache)
    assert (partly.read, partly.decoding, partly.tokens) == (3, False, [])
    assert (whole.read, whole.decoding, whole.tokens) == (4, True, [70])
    assert len(rows_of(committed)) == 7, "the drafter sees every prompt row"
    assert (committed.kept, committed.accepted, committed.added) == ((0, 0), (0, 0), (0, 1))
    assert (partly.totals.steps, whole.totals.steps) == (0, 0)


def test_decoding_and_reading_in_one_step(cache: SlotCache) -> None:
    requests = [decoding_request(4, [9]), Request(id=1, prompt=[1, 2], max_new_tokens=1)]
    packed = make_row([[11]], length=[4], prompts=[[1, 2]])
    committed = run_commit(make_verdict(packed, [0, 0], [50, 60]), packed, None, requests, cache)
    assert [request.tokens for request in requests] == [[9, 50], [60]]
    assert rows_of(committed) == [(0, 4, 1004, 9), (1, 0, 1000, 1), (1, 1, 1001, 2)]
    assert committed.finished == (1,), "one token was all it wanted"


@pytest.mark.parametrize(("scores", "logits"), [(True, True), (True, False), (False, True), (False, False)])
def test_scores_and_logits_of_committed_tokens_are_kept_on_request(
    cache: SlotCache, scores: bool, logits: bool
) -> None:
    options = {"keeps_scores": scores, "keeps_logits": logits}
    ending = decoding_request(7, [9], eos=frozenset({22}), **options)
    whole, partly = (Request(id=i, prompt=[1, 2], max_new_tokens=9, **options) for i in (2, 3))  # type: ignore[arg-type]
    requests = [decoding_request(4, [9], **options), ending, whole, partly]
    packed = make_row([[11, 12, 13], [21, 22, 23]], length=[4, 7], prompts=[[1, 2], [1]])
    # The second prompt is not read to its end, so there are no logits for it.
    packed = replace(packed, logit_rows=torch.tensor([*range(8), 9]))
    run_commit(make_verdict(packed, [1, 3, 0, 0], [50, 60, 70, -1]), packed, None, requests, cache)
    rows = [[0, 1], [4, 5], [8], []]
    assert [len(request.tokens) - had for request, had in zip(requests, [1, 1, 0, 0], strict=True)] == [2, 2, 1, 0]
    assert [[row.tolist() for row in request.scores] for request in requests] == [
        [[[2.0 * k, 2 * k + 0.5]] for k in own] if scores else [] for own in rows
    ]
    assert [[row.tolist() for row in request.logits] for request in requests] == [
        [[[float(k), k + 0.25]] for k in own] if logits else [] for own in rows
    ]
    assert {row.dtype for request in requests for row in request.scores + request.logits} <= {torch.float32}


def test_log_probabilities_of_committed_tokens_are_kept_on_request(cache: SlotCache) -> None:
    ending = decoding_request(7, [9], eos=frozenset({22}), keeps_logprobs=True)
    whole = Request(id=2, prompt=[1, 2], max_new_tokens=9, keeps_logprobs=True)
    requests = [decoding_request(4, [9]), ending, whole, Request(id=3, prompt=[1, 2], max_new_tokens=9)]
    packed = make_row([[11, 12, 13], [21, 22, 23]], length=[4, 7], prompts=[[1, 2], [1]])
    packed = replace(packed, logit_rows=torch.tensor([*range(8), 9]))
    logits = torch.zeros(9, 2)
    choice = Choice(torch.full((9,), -1), logits, -torch.arange(9).float())
    commit(make_verdict(packed, [1, 3, 0, 0], [50, 60, 70, -1]), packed, choice, logits, None, requests, cache)
    assert [request.logprobs for request in requests] == [[], [-4.0, -5.0], [-8.0], []]
    assert not any(request.scores for request in requests)


def test_criteria_are_asked_after_each_new_token(cache: SlotCache) -> None:
    seen = []

    def two_new(ids: torch.Tensor, scores: object) -> torch.Tensor:
        seen.append((ids.tolist(), scores))
        return torch.tensor([ids.shape[1] == 8])

    request = decoding_request(4, [9], criteria=StoppingCriteriaList([two_new]), left_pads=1, pad=7)
    packed = make_row([[11, 12, 13]], length=[4])
    committed = run_commit(make_verdict(packed, [3], [14]), packed, None, [request], cache)
    assert seen == [([[7, 1, 1, 1, 1, 9, 11]], None), ([[7, 1, 1, 1, 1, 9, 11, 12]], None)]
    assert (request.tokens, request.finish_reason) == ([9, 11, 12], "stop")
    assert (committed.added, committed.accepted) == ((2,), (2,))


# Trees.


def make_trees(prompts: list[list[int]] = ()) -> tuple[Packed, list[Request]]:  # type: ignore[assignment]
    """Returns a row of two trees behind 4 and 7 cells, each 11 -> 13 and 12 -> 14, and their requests."""
    packed = make_row([[11, 12, 13, 14], [11, 12, 13, 14]], [4, 7], prompts)
    node = torch.tensor([*range(-1, 4), *range(-1, 4), *([-1] * sum(map(len, prompts)))])
    packed = branch(replace(packed, node=node, width=5), torch.tensor([[-1, -1, 0, 1]] * (2 + len(prompts))))
    assert packed.ancestors is not None
    return replace(packed, ancestors=packed.ancestors[:10]), [decoding_request(4, [9]), decoding_request(7, [8, 9])]


# What the target chooses behind 9, 11, 12, 11 13, 12 14: one path is 12 14, the other 11.
SAYS = [12, 0, 14, 0, 50, 11, 60, 0, 0, 0]


def test_the_path_of_a_tree_is_committed_as_text(cache: SlotCache) -> None:
    packed, requests = make_trees()
    taps = torch.arange(len(packed)).float()[:, None]
    for layer in cache.layers:
        layer.keys[:] = torch.arange(64)[:, None, None]
    committed = run_commit(accept(torch.tensor(SAYS), packed), packed, taps, requests, cache)
    assert [request.tokens for request in requests] == [[9, 12, 14, 50], [8, 9, 11, 60]]
    # Nodes 1 and 3 lie in cells 6 and 8, and stand behind the anchor in the text.
    assert rows_of(committed) == [
        (0, 4, 1004, 9),
        (0, 5, 1005, 12),
        (0, 6, 1006, 14),
        (1, 7, 1007, 9),
        (1, 8, 1008, 11),
    ]
    assert committed.taps is not None
    assert committed.taps.flatten().tolist() == [0, 2, 4, 5, 6]
    assert (committed.kept, committed.accepted, committed.added) == ((4, 4), (2, 1), (3, 2))
    assert [request.length for request in requests] == [7, 9]
    assert [(r.totals.steps, r.totals.kept, r.totals.accepted) for r in requests] == [(1, 4, 2), (1, 4, 1)]
    assert cache.layers[0].keys[0, :8, 0, 0].tolist() == [0, 1, 2, 3, 4, 6, 8, 7], "K lie where the drafter is told"


def test_a_path_may_hold_the_end(cache: SlotCache) -> None:
    packed, requests = make_trees()
    requests[0].eos = frozenset({12})
    requests[1].max_new_tokens = 3
    committed = run_commit(accept(torch.tensor(SAYS), packed), packed, None, requests, cache)
    assert [request.tokens for request in requests] == [[9, 12], [8, 9, 11]]
    assert [request.finish_reason for request in requests] == ["eos", "length"]
    assert (committed.accepted, committed.added, committed.finished) == ((1, 1), (1, 1), (0, 1))


def test_trees_and_a_prompt_in_one_step(cache: SlotCache) -> None:
    packed, requests = make_trees([[1, 2]])
    requests.append(Request(id=2, prompt=[1, 2], max_new_tokens=9))
    committed = run_commit(accept(torch.tensor([*SAYS, 0, 70]), packed), packed, None, requests, cache)
    assert [request.tokens for request in requests] == [[9, 12, 14, 50], [8, 9, 11, 60], [70]]
    assert rows_of(committed)[5:] == [(2, 0, 1000, 1), (2, 1, 1001, 2)]


def test_scores_logits_and_log_probabilities_are_those_along_the_path(cache: SlotCache) -> None:
    packed, requests = make_trees([[1, 2], [1]])
    packed = replace(packed, logit_rows=torch.tensor([*range(10), 11]))
    requests += [Request(id=i, prompt=[1, 2], max_new_tokens=9) for i in (2, 3)]
    for request in requests:
        request.keeps_scores = request.keeps_logits = request.keeps_logprobs = True
    logits = torch.arange(11.0)[:, None] + torch.tensor([0.0, 0.25])
    choice = Choice(torch.full((11,), -1), 2 * logits, -torch.arange(11).float())
    commit(accept(torch.tensor([*SAYS, 70]), packed), packed, choice, logits, None, requests, cache)
    rows = [[0, 2, 4], [5, 6], [10], []]
    assert [len(request.tokens) - had for request, had in zip(requests, [1, 2, 0, 0], strict=True)] == [3, 2, 1, 0]
    assert [[row.tolist() for row in request.scores] for request in requests] == [
        [[[2.0 * k, 2 * k + 0.5]] for k in own] for own in rows
    ]
    assert [[row.tolist() for row in request.logits] for request in requests] == [
        [[[float(k), k + 0.25]] for k in own] for own in rows
    ]
    assert [request.logprobs for request in requests] == [[float(-k) for k in own] for own in rows]
