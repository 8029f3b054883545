"""Replays take the steps that the engine takes with every draft verified."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_dcut.assembly import open_engine
from hf_dcut.bench.replay import Replay, replay
from hf_dcut.config import DCutConfig
from hf_dcut.drafters.base import Drafter
from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.drafters.oracle import OracleDrafter
from hf_dcut.drafters.prompt_lookup import PromptLookupDrafter
from hf_dcut.drafters.training import Answer
from hf_dcut.regeneration import regenerate
from hf_dcut.requests import Request

PROMPTS = [(5, 17), (40, 9, 33), (7,), (60, 61, 62, 63), (8, 9, 8, 9), (90, 3)]
TOKENS = 21


@pytest.fixture(scope="module")
def target(make_target: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    # Token 60 is said by some of the answers and not by others, so both ways to end are there.
    return make_target("llama", eos_token_id=60)


@pytest.fixture(scope="module")
def answers(target: PreTrainedModel) -> list[Answer]:
    return list(regenerate(target, PROMPTS, TOKENS, slots=3))


def oracle(answers: list[Answer]) -> OracleDrafter:
    said = {a.ids[: a.prompt_tokens]: a.ids[a.prompt_tokens :] for a in answers}
    return OracleDrafter(said, draft_tokens=4, profile=(0.5, 0.9, 1.0))


def random_dflash(target: PreTrainedModel) -> DFlashDrafter:
    # Six tokens can be drafted, so some drafts are right by chance.
    options = {"taps": (0, 2), "mask_token_id": 3, "block_size": 4, "layers": 2, "dtype": target.dtype}
    return DFlashDrafter.random(target.config, draft_ids=[2, 9, 17, 33, 60, 80], **options)


def engine_stats(target: PreTrainedModel, drafter: Drafter) -> Any:
    requests = [Request(i, list(p), TOKENS, eos=frozenset({60})) for i, p in enumerate(PROMPTS)]
    with open_engine(target, drafter, DCutConfig(budget=1.0, draft_tree=False), 3, 4, 4 + TOKENS) as engine:
        list(engine.run(requests))
    return engine.stats


@pytest.mark.parametrize("kind", ["oracle", "lookup", "dflash"])
def test_steps_are_the_engines(target: PreTrainedModel, answers: list[Answer], kind: str) -> None:
    lookup = PromptLookupDrafter(5)
    drafter = {"oracle": oracle(answers), "lookup": lookup, "dflash": random_dflash(target)}[kind]
    stats, steps = engine_stats(target, drafter), replay(drafter, target, answers, slots=4)
    # The engine drafts nothing where one token is left.
    last = int((steps.open.sum(1) == 1).sum())
    full = [sum(row) for row, known in zip(steps.accepted.tolist(), steps.open.tolist(), strict=True) if sum(known) > 1]
    assert len(full) <= stats.rows + stats.plain_steps <= len(full) + last
    assert steps.added.sum() == sum(len(a) - a.prompt_tokens - 1 for a in answers)
    assert steps.tokens_per_step == pytest.approx(stats.mean_accepted_tokens, rel=0.02)


def test_answers_of_both_ends_are_there(answers: list[Answer]) -> None:
    assert {a.ids[-1] == 60 for a in answers} == {True, False}


def test_order_and_slots_change_nothing(target: PreTrainedModel, answers: list[Answer]) -> None:
    drafter = random_dflash(target)
    alone = replay(drafter, target, answers, slots=1)
    among = replay(drafter, target, answers[::-1], slots=6)
    assert sorted(alone.accepted.sum(1).tolist()) == sorted(among.accepted.sum(1).tolist())
    assert len(alone.right) == len(among.right)


def test_what_a_replay_sums_up_to() -> None:
    right = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 0]]).bool()
    known = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0]]).bool()
    steps = Replay(torch.full((4, 3), 0.5), right, known, known, torch.tensor([3, 2, 1, 2]))
    assert steps.accepted.sum(1).tolist() == [2, 1, 0, 2]
    assert steps.tokens_per_step == 2.0
    assert steps.place_acceptance == [0.75, 0.5, 0.0]
    assert steps.survival[0].tolist() == [0.5, 0.25, 0.125]


def test_nothing_to_replay(target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="nothing to draft"):
        replay(PromptLookupDrafter(), target, [Answer((1, 2), 1)])
