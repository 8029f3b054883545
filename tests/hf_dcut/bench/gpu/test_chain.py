"""The oracle of chain models is right as often as it says, and every step pays for a real draft."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
import torch

from hf_dcut.bench.gpu.chain import ChainOracle
from hf_dcut.bench.gpu.rig import Rig
from hf_dcut.bench.gpu.shapes import SMALL, chain_model, random_prompts, successors
from hf_dcut.bench.methods import Setting
from hf_dcut.bench.running import run
from hf_dcut.drafters.dflash.bound import BoundDFlash
from hf_dcut.types import Batch, Drafts

CPU = torch.device("cpu")
D = 4


def batch_at(length: int, rows: int = 200, first: int = 0) -> Batch:
    number = torch.arange(first, first + rows)
    return Batch(number, torch.full_like(number, length), (number * 7) % 512, number * 0 + 99, number, number * 0)


def propose(oracle: ChainOracle, batch: Batch) -> Drafts:
    blank = torch.zeros(len(batch), D, dtype=torch.int64)
    return oracle(Drafts.chain(blank, blank.float()), batch)


def test_it_is_right_as_often_as_it_says() -> None:
    profile = (0.3, 0.8)
    oracle = ChainOracle(512, D, profile, 400, CPU)
    right: dict[float, list[bool]] = {round(c, 4): [] for c in profile}
    for length in range(0, 400, D):
        batch = batch_at(length)
        drafts = propose(oracle, batch)
        truth = torch.tensor([successors(int(anchor), D, 512) for anchor in batch.anchor])
        for sure, correct in zip(drafts.confidence, drafts.token == truth, strict=True):
            assert sure.unique().numel() == 1, "a block has one mood"
            right[round(float(sure[0]), 4)] += correct.tolist()
    for confidence, outcomes in right.items():
        assert len(outcomes) > 30000
        # Six standard deviations of a mean of so many.
        assert abs(sum(outcomes) / len(outcomes) - confidence) < 6 * 0.5 / len(outcomes) ** 0.5


def test_drafts_depend_on_request_and_place_alone() -> None:
    oracle = ChainOracle(512, D, (0.5,), 64, CPU)
    whole, part = propose(oracle, batch_at(9)), propose(oracle, batch_at(9, rows=3, first=5))
    assert torch.equal(whole.token[5:8], part.token)
    assert not torch.equal(whole.token, propose(oracle, batch_at(10)).token)


def test_a_graph_can_hold_it(no_host_reads: Callable[[], AbstractContextManager[None]]) -> None:
    oracle, batch = ChainOracle(512, D, (0.5, 0.9), 64, CPU), batch_at(9)
    expected = propose(oracle, batch)
    with no_host_reads():
        found = propose(oracle, batch)
    assert torch.equal(found.token, expected.token)
    assert oracle.capturable


def test_another_profile_can_be_written_into_it() -> None:
    oracle = ChainOracle(512, D, (0.0, 0.0), 64, CPU)
    oracle.profile.copy_(torch.ones(2))
    batch = batch_at(3, rows=5)
    assert propose(oracle, batch).token.tolist() == [successors(int(a), D, 512) for a in batch.anchor]


def test_every_step_pays_for_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tiny=True)
    depth = rig.sizes.block - 1
    model = chain_model(SMALL, CPU, torch.float32)
    drafter, oracle = rig.oracle_drafter(model, rig.random_drafter(model), 24)
    oracle.profile.fill_(1.0)
    calls = []
    propose = BoundDFlash.propose

    def counted(self: BoundDFlash, batch: Batch) -> Drafts:
        calls.append(len(batch))
        return propose(self, batch)

    monkeypatch.setattr(BoundDFlash, "propose", counted)
    prompts = random_prompts(3, 4, 8, 512)
    outcome = run("1.0", replace(Setting(model, drafter, 2, 16, 8), draft_tokens=depth), prompts)
    assert outcome.sequences == [successors(p[-1], 16, 512) for p in prompts]
    assert outcome.stats is not None
    assert outcome.stats.kept == outcome.stats.accepted_tokens > 0, "it never errs"
    assert len(calls) == outcome.stats.drafted_steps
