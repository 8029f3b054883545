"""The loop with fewer slots than requests, prompts read in pieces, and drafters that misbehave."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import pytest
import torch
from transformers import PreTrainedModel

from hf_dcut.assembly import open_engine
from hf_dcut.config import DCutConfig
from hf_dcut.cost_table import CostTable
from hf_dcut.drafters.base import BoundDrafter, Drafter
from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.drafters.oracle import OracleDrafter
from hf_dcut.drafters.prompt_lookup import PromptLookupDrafter
from hf_dcut.drafters.wrapping import BoundWrapped
from hf_dcut.engine import Engine
from hf_dcut.requests import Request
from hf_dcut.skipping import SkipRule
from hf_dcut.stats import Stats
from hf_dcut.types import Batch, Committed, Drafts

D = 3
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, 17], [18, 19, 20, 21], [22], [23, 24, 25, 26, 27]]
LENGTHS = [12, 1, 7, 2, 9, 14, 3]
END = 43  # the text after some of the prompts holds it


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return tiny_llama(eos_token_id=None)


@pytest.fixture(scope="module")
def texts(model: PreTrainedModel, said_alone: Callable[..., list[list[int]]]) -> list[list[int]]:
    """What plain `generate` says after each prompt alone, up to its own length or the end token."""
    texts = said_alone(model, PROMPTS, LENGTHS, END)
    assert {text[-1] == END for text in texts} == {True, False}
    return texts


def make_drafter(kind: str, model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> Drafter | None:
    shape = {"taps": [0, 2], "mask_token_id": 3, "block_size": D + 1, "layers": 1, "dtype": torch.float64}
    known = {tuple(p): list(t) for p, t in zip(PROMPTS, texts, strict=True)}
    return {
        "none": lambda: None,
        "prompt lookup": lambda: PromptLookupDrafter(D),
        "oracle": lambda: OracleDrafter(known, D, (0.1, 0.7, 1.0)),
        "dflash": lambda: DFlashDrafter.random(model.config, **shape),
    }[kind]()


def make_requests() -> list[Request]:
    pairs = zip(PROMPTS, LENGTHS, strict=True)
    return [Request(i, p, n, frozenset({END})) for i, (p, n) in enumerate(pairs)]


def run(
    model: PreTrainedModel, drafter: Drafter | None, slots: int, requests: list[Request], **options: object
) -> tuple[list[int], Stats]:
    """Returns the ids in the order they finished, and the stats."""
    config = DCutConfig(**{"budget": 0.5, **options})  # type: ignore[arg-type]
    prompt, longest = max(map(len, PROMPTS)), max(len(p) + n for p, n in zip(PROMPTS, LENGTHS, strict=True))
    with open_engine(model, drafter, config, slots, prompt, longest, stats=Stats(records=[])) as engine:
        order = [request.id for request in engine.run(requests)]
        assert not engine.roster.live
        assert not engine.roster.waiting
        return order, engine.stats


@pytest.mark.parametrize("kind", ["none", "prompt lookup", "oracle", "dflash"])
@pytest.mark.parametrize(("slots", "at_once"), [(1, 4096), (2, 3), (3, 1), (3, 4096), (7, 5), (9, 4096)])
def test_slots_are_refilled_and_every_text_is_its_own(
    model: PreTrainedModel, texts: list[list[int]], kind: str, slots: int, at_once: int
) -> None:
    requests = make_requests()
    order, stats = run(model, make_drafter(kind, model, texts), slots, requests, max_prefill_tokens=at_once)
    assert [request.tokens for request in requests] == texts
    assert sorted(order) == list(range(len(PROMPTS)))
    assert stats.new_tokens == sum(map(len, texts))
    assert stats.prompt_tokens == sum(map(len, PROMPTS))
    assert [r.finish_reason for r in requests] == ["eos" if t[-1] == END else "length" for t in texts]
    assert all(len(record.requests) <= slots for record in stats.records or [])


@pytest.mark.parametrize("kind", ["prompt lookup", "oracle", "dflash"])
def test_what_a_drafter_knows_of_a_request_moves_with_it(
    model: PreTrainedModel, texts: list[list[int]], kind: str
) -> None:
    outcomes = []
    for slots in (1, 3, 7):  # alone, and among others that finish before
        requests = make_requests()
        run(model, make_drafter(kind, model, texts), slots, requests, budget=1.0)
        outcomes.append([(r.totals.steps, r.totals.kept, r.totals.accepted) for r in requests])
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_totals_of_requests_add_up_to_those_of_the_steps(model: PreTrainedModel, texts: list[list[int]]) -> None:
    requests = make_requests()
    _, stats = run(model, make_drafter("oracle", model, texts), 3, requests)
    assert sum(request.totals.kept for request in requests) == stats.kept
    assert sum(request.totals.accepted for request in requests) == stats.accepted_tokens
    assert sum(request.totals.steps for request in requests) == sum(map(len, stats.kept_depths))


def test_prompts_are_read_in_pieces_of_the_size_allowed(model: PreTrainedModel, texts: list[list[int]]) -> None:
    _, stats = run(model, None, 9, make_requests(), budget="none", max_prefill_tokens=4)
    read = [record.total - len(record.requests) for record in stats.records or []]
    assert max(read) == 4
    assert sum(read) == sum(map(len, PROMPTS))


def test_nothing_is_drafted_for_requests_without_room(model: PreTrainedModel) -> None:
    requests = [Request(0, PROMPTS[0], 2)]
    _, stats = run(model, PromptLookupDrafter(D), 1, requests, budget=1.0)
    assert (stats.drafted_steps, stats.plain_steps) == (0, 1)


def sure(confidence: Callable[[int], float]) -> Callable[[Batch], Drafts]:
    """Returns who drafts token 7, with the confidence that a function of the step's number gives."""
    steps = count()
    return lambda batch: Drafts.chain(
        torch.full((len(batch), D), 7), torch.full((len(batch), D), confidence(next(steps)))
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_steps_whose_drafts_cannot_be_ranked_are_plain(
    model: PreTrainedModel,
    texts: list[list[int]],
    stub_drafter: Callable[..., Drafter],
    caplog: pytest.LogCaptureFixture,
    bad: float,
) -> None:
    requests, drafter = make_requests(), stub_drafter(D, sure(lambda step: bad if step % 2 else 0.5))
    with caplog.at_level(logging.WARNING, "hf_dcut"):
        _, stats = run(model, drafter, 7, requests)
    (line,) = caplog.messages
    assert "non-finite confidences" in line
    assert [request.tokens for request in requests] == texts
    drafted = [record.budget is not None for record in stats.records or [] if record.requests]
    assert drafted[:4] == [True, False, True, False]


def test_auto_skips_drafts_that_do_not_pay(
    model: PreTrainedModel, texts: list[list[int]], stub_drafter: Callable[..., Drafter]
) -> None:
    table = CostTable.from_rows({7: {0: 1.0, 7: 3.0, 28: 4.0}}, D)
    requests = make_requests()
    drafter = stub_drafter(D, sure(lambda step: 0.9))
    _, stats = run(model, drafter, 7, requests, budget="auto", cost_table=table, deterministic=True)
    assert [request.tokens for request in requests] == texts
    assert stats.plain_steps > stats.drafted_steps > 0
    assert table.seconds == {0: {7: {0: 1.0, 7: 3.0, 28: 4.0}}}, "deterministic"


class Spied(BoundWrapped):
    """Keeps what is drafted, and how many rows are taken in at a time."""

    def __init__(self, drafter: BoundDrafter):
        super().__init__(drafter, self.keep)
        self.drafted: list[tuple[list[int], list[int]]] = []
        self.observed: list[int] = []

    def keep(self, drafts: Drafts, batch: Batch) -> Drafts:
        self.drafted.append((batch.length.tolist(), drafts.token.flatten().tolist()))
        return drafts

    def observe(self, committed: Committed) -> None:
        self.observed.append(len(committed.token))
        super().observe(committed)


def test_drafts_after_a_pause_are_as_if_every_step_had_been_observed_at_once(
    model: PreTrainedModel, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile slots are freed, moved and refilled, and prompts read."""
    drafter = make_drafter("dflash", model, texts)
    assert drafter is not None
    spies = []
    for waits in (True, False):
        if not waits:
            monkeypatch.setattr(SkipRule, "pausing", False)
        requests = [Request(i, p, 12 + 3 * i) for i, p in enumerate(PROMPTS)]
        table = CostTable.from_rows({3: {0: 1.0, 3: 1.15, 12: 1.2}}, D)
        config = DCutConfig(budget="auto", draft_tree=False, cost_table=table, deterministic=True)
        with open_engine(model, drafter, config, 3, 7, 40) as engine:
            assert engine.drafting.drafter is not None
            spies.append(Spied(engine.drafting.drafter))
            engine.drafting.drafter = spies[-1]
            list(engine.run(requests))
            assert engine.stats.plain_steps > engine.stats.drafted_steps > 3
    waiting, at_once = spies
    assert waiting.drafted == at_once.drafted
    assert sum(waiting.observed) == sum(at_once.observed)
    assert len(waiting.observed) < 0.8 * len(at_once.observed)


def test_auto_follows_what_steps_take_unless_deterministic(model: PreTrainedModel) -> None:
    table = CostTable.from_rows({7: {0: 1.0, 7: 1.0, 28: 1.0}}, D)
    run(model, PromptLookupDrafter(D), 7, make_requests(), budget="auto", cost_table=table)
    assert all(seconds < 1 for seconds in (table.plain(7), table.drafted(7, 7)))


def test_an_engine_that_is_left_early_leaves_no_hooks(model: PreTrainedModel, texts: list[list[int]]) -> None:
    def some(engine: Engine) -> Iterator[Request]:
        yield next(engine.run(make_requests()))

    drafter = make_drafter("dflash", model, texts)
    with open_engine(model, drafter, DCutConfig(budget=0.5), 3, 7, 30) as engine:
        assert len(list(some(engine))) == 1
    assert not any(module._forward_hooks for module in model.modules())
