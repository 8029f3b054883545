"""Suffix decoding against loops over remembered texts; what is remembered, and that no token changes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from hf_dcut import BestOf, DCutConfig, PromptLookupDrafter, SuffixDrafter, warmup
from hf_dcut.bench.drafter import make_drafter
from hf_dcut.drafters.suffix import BoundSuffix
from hf_dcut.types import Batch, Committed, Drafts

ROUNDING = 2.0**-21
# Beside what is remembered, so that all of it can be found: tokens that occur nowhere else.
FILLING = [[1000 + place for place in range(300)]]


def remembering(*texts: list[int], draft_tokens: int = 4, longest_match: int = 3) -> SuffixDrafter:
    drafter = SuffixDrafter(draft_tokens, longest_match)
    drafter.add([*texts, *FILLING])
    return drafter


def committed(slot: int, tokens: list[int], first: int = 0) -> Committed:
    cell = torch.arange(first, first + len(tokens))
    return Committed(
        torch.full_like(cell, slot), cell, cell, torch.tensor(tokens, dtype=torch.int64), None, (), (), (), ()
    )


def batch_after(*texts: list[int]) -> Batch:
    """Returns the batch of requests in slots 0, 1, .. whose texts end with their anchors."""
    length, anchor = torch.tensor([len(text) - 1 for text in texts]), torch.tensor([text[-1] for text in texts])
    slot = torch.arange(len(texts))
    return Batch(slot, length, anchor, torch.full_like(slot, 99), slot, torch.zeros_like(slot))


def bound_after(drafter: SuffixDrafter, *texts: list[int]) -> BoundSuffix:
    bound = drafter.bind(torch.nn.Module(), len(texts), 400)  # type: ignore[arg-type]
    for slot, text in enumerate(texts):
        bound.observe(committed(slot, text[:-1]))
    return bound


def continuations(texts: list[list[int]], suffix: list[int], depth: int, longest: int) -> tuple[list[list[int]], int]:
    """Returns what followed the longest matches, latest first, and their length."""
    for n in range(min(longest, len(suffix)), 0, -1):
        ends = [(t, e) for t in texts for e in range(n - 1, len(t) - 1) if t[e - n + 1 : e + 1] == suffix[-n:]]
        if ends:
            return [t[e + 1 : e + 1 + depth] for t, e in ends[::-1]][:32], n
    return [], 0


def survivals(said: list[list[int]], n: int) -> dict[tuple[int, ...], float]:
    """Returns the survival of every path that somebody went."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for d in range(max(map(len, said), default=0)):
        for path in {tuple(s[: d + 1]) for s in said if len(s) > d}:
            voters = sum(len(s) > d and tuple(s[:d]) == path[:-1] for s in said)
            votes = sum(tuple(s[: d + 1]) == path for s in said)
            found[path] = found[path[:-1]] * votes / (voters + 24 / (n + d) ** 2)
    return found


def paths_of(drafts: Drafts, row: int = 0) -> list[tuple[int, ...]]:
    """Returns the path to each node of a tree."""
    assert drafts.parent is not None
    found: list[tuple[int, ...]] = []
    for token, parent in list(zip(drafts.token[row].tolist(), drafts.parent[row].tolist(), strict=True)):
        found.append(((*found[parent], token) if parent >= 0 else (token,)) if len(found) < drafts.count[row] else ())
    return found[: int(drafts.count[row])]


TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=14)


@given(texts=st.lists(TEXT, min_size=1, max_size=6), suffix=TEXT, nodes=st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_trees_are_the_likeliest_paths_that_others_went(texts: list[list[int]], suffix: list[int], nodes: int) -> None:
    said, n = continuations(texts, suffix, 4, 3)
    expected = survivals(said, n)
    del expected[()]
    drafts = bound_after(remembering(*texts), suffix).propose_tree(batch_after(suffix), nodes)
    paths = paths_of(drafts)
    assert len(paths) == min(nodes, len(expected)) == len(set(paths))
    got = drafts.confidence[0, : len(paths)].cumprod(0).tolist()
    assert got == pytest.approx([expected[path] for path in paths], rel=ROUNDING * 10)
    assert got == pytest.approx(sorted(expected.values(), reverse=True)[:nodes], rel=ROUNDING * 10)


@given(texts=st.lists(TEXT, min_size=1, max_size=6), suffix=TEXT)
@settings(max_examples=100, deadline=None)
def test_chains_are_the_continuation_that_promises_most(texts: list[list[int]], suffix: list[int]) -> None:
    said, n = continuations(texts, suffix, 4, 3)
    likely = survivals(said, n)
    promised = {tuple(s): sum(likely[tuple(s[: d + 1])] for d in range(len(s))) for s in said}
    drafts = bound_after(remembering(*texts), suffix).propose(batch_after(suffix))
    chain = tuple(drafts.token[0, : drafts.count[0]].tolist())
    if not said:
        assert not chain
        return
    assert promised[chain] == pytest.approx(max(promised.values()), rel=ROUNDING * 10)
    survival = drafts.confidence[0, : len(chain)].cumprod(0).tolist()
    assert survival == pytest.approx([likely[chain[: d + 1]] for d in range(len(chain))], rel=ROUNDING * 10)


def test_confidences_become_honest() -> None:
    """Of drafts that are right in two of three cases the confidences approach that, whatever they were at first."""
    for doubters in (1.0, 24.0, 90.0):
        drafter = remembering([5, 6, 7, 8, 9], draft_tokens=1)
        drafter.doubters = doubters
        sure = []
        for step in range(600):
            bound = bound_after(drafter, [5, 6, 7])
            drafts = bound.propose(batch_after([5, 6, 7]))
            assert drafts.token[0, 0] == 8
            sure.append(float(drafts.confidence[0, 0]))
            bound.observe(committed(0, [7], 2))
            bound.propose(batch_after([5, 6, 7, 8 if step % 3 else 5]))
        assert sum(sure[-60:]) / 60 == pytest.approx(2 / 3, abs=0.08)


def test_what_was_never_decided_teaches_nothing() -> None:
    drafter = remembering([7, 8, 9, 6])
    bound = bound_after(drafter, [1, 7])
    drafts = bound.propose(batch_after([1, 7]))
    assert drafts.count[0] == 3
    first = float(drafts.confidence[0, 0])
    bound.observe(committed(0, [7], 1))
    # The first draft was wrong: those behind it were never asked for.
    bound.propose(batch_after([1, 7, 5]))
    assert drafter.doubters == pytest.approx(24 * math.exp(0.02 * first))
    bound.free(0)
    before = drafter.doubters
    other = [1, 7]
    bound.observe(committed(0, other[:-1]))
    bound.propose(batch_after(other))
    assert drafter.doubters == before


def test_answers_are_remembered_and_prompts_are_not() -> None:
    drafter = remembering()
    bound = bound_after(drafter, [5, 6, 7])
    bound.propose(batch_after([5, 6, 7]))
    bound.observe(committed(0, [7, 8, 9, 10], 2))
    bound.free(0)
    drafter.add(FILLING)
    other = bound_after(drafter, [7, 8], [5, 6])
    drafts = other.propose(batch_after([7, 8], [5, 6]))
    assert drafts.token[0, : drafts.count[0]].tolist() == [9, 10]
    assert drafts.count[1] == 0


def test_requests_learn_from_those_that_still_run() -> None:
    drafter, answer = remembering(), list(range(10, 90))
    bound = bound_after(drafter, [1, 2], [1, 3])
    bound.propose(batch_after([1, 2], [1, 3]))
    for first in range(0, 80, 8):
        bound.observe(committed(0, answer[first : first + 8], 1 + first))
        drafter.add(FILLING)
    bound.observe(committed(1, [3, 20], 1))
    drafts = bound.propose(batch_after([1, 2, *answer[1:], 90], [1, 3, 20, 21]))
    assert drafts.token[1, : drafts.count[1]].tolist() == [22, 23, 24, 25]


def test_a_request_that_moves_is_remembered_once() -> None:
    drafter = remembering()
    bound = bound_after(drafter, [1, 2], [1, 3])
    bound.propose(batch_after([1, 2], [1, 3]))
    bound.observe(committed(0, [2, 30, 31], 1))
    bound.observe(committed(1, [3, 40, 41], 1))
    bound.move(1, 0)  # the first request has ended
    bound.free(1)
    bound.observe(committed(0, [42, 43], 4))
    bound.free(0)
    drafter.add(FILLING)
    tokens = torch.cat([index.tokens[index.findable] for index in drafter.corpus.indexes]).tolist()
    assert [token for token in tokens if token < 1000] == [2, 30, 31, 3, 40, 41, 42, 43]


def test_steps_that_are_measured_are_not_remembered(model: PreTrainedModel) -> None:
    drafter = SuffixDrafter()
    warmup(model, drafter, [1, 2], DCutConfig(cost_table="off"), max_length=64)
    drafter.add(FILLING)
    (index,) = drafter.corpus.indexes
    assert index.tokens.tolist() == [*FILLING[0], -1]


@pytest.mark.parametrize("dcut", [True, 1.0, 0.4, {"budget": 0.5, "draft_tree": False}])
@pytest.mark.parametrize("beside", [False, True])
def test_no_token_changes_and_the_second_time_is_faster(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], dcut: Any, beside: bool
) -> None:
    expected = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    memory = SuffixDrafter()
    drafter = BestOf([PromptLookupDrafter(), memory]) if beside else memory
    assert drafter.remembers
    options = {"assistant_model": drafter, "dcut": dcut, "max_new_tokens": 40, "return_dict_in_generate": True}
    steps = []
    for _ in range(2):
        out = model.generate(**inputs, **options, do_sample=False)
        assert torch.equal(out.sequences, expected)
        steps.append(out.stats.steps)
        memory.add([[3] * 300])
    assert steps[1] < 0.7 * steps[0]


def test_draws_do_not_depend_on_what_is_remembered(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> None:
    options = {"max_new_tokens": 30, "do_sample": True, "seed": [1, 2, 3, 4, 5]}
    plain = model.generate(**inputs, **options, dcut="none")
    drafter = SuffixDrafter()
    for _ in range(2):
        assert torch.equal(model.generate(**inputs, **options, assistant_model=drafter, dcut=1.0), plain)
        drafter.add([[3] * 300])


def test_texts_of_another_tokenizer_are_refused(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> None:
    vocabulary, drafter = model.get_input_embeddings().weight.shape[0], SuffixDrafter()
    drafter.add([[vocabulary - 1], []])
    drafter.check(model)
    drafter.add([[1, vocabulary, 2]])
    with pytest.raises(ValueError, match=rf"remembers token {vocabulary}, and the target has {vocabulary} tokens"):
        model.generate(**inputs, assistant_model=drafter, dcut=1.0, max_new_tokens=4)
    with pytest.raises(ValueError, match="texts has the token id -100: give ids from 0 on"):
        drafter.add([[1, -100]])


@pytest.mark.parametrize("name", ["draft_tokens", "longest_match", "most_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_bad_numbers_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"suffix drafter {name}={value}: give a positive integer"):
        SuffixDrafter(**{name: value})  # type: ignore[arg-type]


def test_the_benchmark_refuses_what_would_learn_from_the_methods_before(model: PreTrainedModel) -> None:
    for name in ("suffix", "lookup+suffix"):
        with pytest.raises(ValueError, match=r"drafter '.*suffix' remembers what was generated.*examples/rollouts.py"):
            make_drafter(name, model)
