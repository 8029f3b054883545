"""An oracle's drafts at a drafter's price: both see everything, the oracle's count."""

from __future__ import annotations

import pytest
import torch

from hf_dcut.bench.gpu.priced import Priced
from hf_dcut.bench.gpu.shapes import SMALL, chain_model, random_prompts, successors
from hf_dcut.bench.methods import Setting, run
from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.drafters.dflash.bound import BoundDFlash
from hf_dcut.drafters.oracle import OracleDrafter
from hf_dcut.types import Batch, Drafts


def test_every_step_pays_and_the_oracles_drafts_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = chain_model(SMALL, torch.device("cpu"), torch.float32)
    prompts = random_prompts(3, 4, 8, 512)
    said = {tuple(p): successors(p[-1], 30, 512) for p in prompts}
    dflash = DFlashDrafter.random(model.config, taps=(0, 1), mask_token_id=2, block_size=5, layers=1)
    drafter = Priced(OracleDrafter(said, 4), dflash)
    calls = []
    propose = BoundDFlash.propose

    def counted(self: BoundDFlash, batch: Batch) -> Drafts:
        calls.append(len(batch))
        return propose(self, batch)

    monkeypatch.setattr(BoundDFlash, "propose", counted)
    outcome = run("1.0", Setting(model, drafter, 2, 16, 8, draft_tokens=4), prompts)
    assert outcome.sequences == [successors(p[-1], 16, 512) for p in prompts]
    assert outcome.stats is not None
    assert outcome.stats.kept == outcome.stats.accepted_tokens > 0, "it never errs"
    assert len(calls) == outcome.stats.drafted_steps
    assert drafter.cell_bytes(model) > dflash.cell_bytes(model)
    assert drafter.taps == (0, 1)
