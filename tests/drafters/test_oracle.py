"""The oracle knows the continuation, and errs as often as it says."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_dcut.drafters.oracle import BoundOracle, OracleDrafter
from hf_dcut.types import Batch, Committed

VOCABULARY, D = 1000, 4
PROMPTS = [(1, 2, 3), (7,)]
CONTINUATIONS = {(1, 2, 3): list(range(100, 140)), (7,): list(range(200, 240))}


def bind(profile: tuple[float, ...] = (1.0,), slots: int = 2, seed: int = 0) -> BoundOracle:
    return BoundOracle(OracleDrafter(CONTINUATIONS, D, profile, seed), slots, 64, VOCABULARY, torch.device("cpu"))


def read(oracle: BoundOracle, slot: int, tokens: tuple[int, ...], first: int = 0) -> None:
    cell = torch.arange(first, first + len(tokens))
    oracle.observe(Committed(torch.full_like(cell, slot), cell, cell, torch.tensor(tokens), None, (), (), (), ()))


def batch_at(length: list[int]) -> Batch:
    columns = torch.tensor(length)
    slot = torch.arange(len(length))
    return Batch(slot, columns, slot, torch.full_like(slot, 99), slot, torch.zeros_like(slot))


def test_drafts_are_what_comes_after_the_anchor() -> None:
    oracle = bind()
    for slot, prompt in enumerate(PROMPTS):
        read(oracle, slot, prompt)
    drafts = oracle.propose(batch_at([3, 1]))
    assert drafts.token.tolist() == [[101, 102, 103, 104], [201, 202, 203, 204]], "100 and 200 are the anchors"
    assert drafts.confidence.eq(1).all()
    assert drafts.count.tolist() == [D, D]
    assert oracle.propose(batch_at([5, 9])).token.tolist() == [[103, 104, 105, 106], [209, 210, 211, 212]]


def test_there_are_no_drafts_beyond_what_it_knows() -> None:
    oracle = bind(slots=1)
    read(oracle, 0, (1, 2, 3))
    assert [oracle.propose(batch_at([3 + said])).count.item() for said in (0, 35, 36, 39)] == [4, 4, 3, 0]


def test_an_unknown_prompt_gets_no_drafts() -> None:
    oracle = bind(slots=1)
    read(oracle, 0, (9, 9))
    drafts = oracle.propose(batch_at([2]))
    assert drafts.count.tolist() == [0]
    assert (drafts.token >= 0).all()


def test_always_wrong_drafts() -> None:
    oracle = bind(profile=(0.0,), slots=1)
    read(oracle, 0, (1, 2, 3))
    drafts = oracle.propose(batch_at([3]))
    assert drafts.confidence.eq(0).all()
    assert drafts.token.tolist() == [[102, 103, 104, 105]]


def test_it_errs_as_often_as_its_confidence_says() -> None:
    profile = (0.3, 0.8)
    continuations = {(prompt,): list(range(500)) for prompt in range(40)}
    drafter = OracleDrafter(continuations, D, profile)
    oracle = BoundOracle(drafter, 40, 600, VOCABULARY, torch.device("cpu"))
    for slot in range(40):
        read(oracle, slot, (slot,))
    right: dict[float, list[bool]] = {c: [] for c in profile}
    for said in range(0, 400, D):
        drafts = oracle.propose(batch_at([1 + said] * 40))
        truth = torch.arange(said + 1, said + 1 + D)
        for confidence, correct in zip(drafts.confidence.tolist(), (drafts.token == truth).tolist(), strict=True):
            right[round(confidence[0], 3)] += correct
    for confidence, outcomes in right.items():
        # Hoeffding: true coins stray further than this with probability 1e-6.
        allowed = math.sqrt(math.log(2 / 1e-6) / (2 * len(outcomes)))
        assert abs(sum(outcomes) / len(outcomes) - confidence) < allowed
        assert abs(len(outcomes) / 16000 - 0.5) < math.sqrt(math.log(2 / 1e-6) / (2 * 4000)), "blocks share a mood"


def test_errors_do_not_depend_on_slot_or_company() -> None:
    alone, together = bind((0.5,), slots=1), bind((0.5,), slots=2)
    read(alone, 0, (7,))
    for slot, prompt in enumerate(PROMPTS):
        read(together, slot, prompt)
    assert torch.equal(alone.propose(batch_at([6])).token[0], together.propose(batch_at([4, 6])).token[1])


def test_moves_and_freed_slots() -> None:
    oracle = bind()
    for slot, prompt in enumerate(PROMPTS):
        read(oracle, slot, prompt)
    oracle.propose(batch_at([3, 1]))
    oracle.move(1, 0)
    oracle.free(1)
    assert oracle.propose(batch_at([4])).token.tolist() == [[204, 205, 206, 207]]
    read(oracle, 1, (1, 2, 3))
    assert oracle.propose(batch_at([4, 3])).token[1].tolist() == [101, 102, 103, 104]


def test_a_request_whose_first_steps_were_plain_is_recognised() -> None:
    oracle = bind(slots=1)
    read(oracle, 0, (1, 2, 3))
    read(oracle, 0, (100, 101), first=3)
    assert oracle.propose(batch_at([5])).token.tolist() == [[103, 104, 105, 106]]


def test_the_longest_known_prompt_counts() -> None:
    drafter = OracleDrafter({(1,): [2, 3, 4, 5, 6, 7], (1, 2): [8, 9, 10, 11, 12]}, D)
    oracle = BoundOracle(drafter, 1, 64, VOCABULARY, torch.device("cpu"))
    read(oracle, 0, (1, 2))
    assert oracle.propose(batch_at([2])).token.tolist() == [[9, 10, 11, 12]]


@pytest.mark.parametrize("profile", [(), (1.5,), (-0.1, 0.5), (float("nan"),)])
def test_bad_profiles_are_named(profile: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"oracle profile=.*confidences in \[0, 1\]"):
        OracleDrafter({}, D, profile)


def test_any_target_fits(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    drafter: Any = OracleDrafter(CONTINUATIONS, D)
    drafter.check(tiny_llama())
    bound = drafter.bind(tiny_llama(), slots=2, length=8)
    assert (bound.read.shape, bound.vocabulary) == ((2, 8), 101)
    assert drafter.fingerprint() == {"kind": "oracle", "draft_tokens": D}
