"""What is measured, and that measuring leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from hf_dcut.assembly import open_engine
from hf_dcut.budget import cut
from hf_dcut.config import DCutConfig
from hf_dcut.cost_table import CostTable
from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.drafters.oracle import OracleDrafter
from hf_dcut.drafters.prompt_lookup import PromptLookupDrafter
from hf_dcut.profiling import _mixed_blocks, kv_length_for, powers_of_two
from hf_dcut.requests import Request
from hf_dcut.scores import score
from hf_dcut.stats import Stats
from hf_dcut.types import Batch, Drafts


@pytest.mark.parametrize(
    ("largest", "expected"),
    [(1, [1]), (2, [1, 2]), (7, [1, 2, 4]), (33, [1, 2, 4, 8, 16, 32]), (64, [1, 2, 4, 8, 16, 32, 64])],
)
def test_batch_sizes_are_powers_of_two(largest: int, expected: list[int]) -> None:
    assert powers_of_two(largest) == expected


@pytest.mark.parametrize(("longest", "expected"), [(2, 1), (3, 1), (40, 16), (64, 32), (600, 256), (99999, 2048)])
def test_kv_lengths_fit_and_are_few(longest: int, expected: int) -> None:
    assert kv_length_for(longest) == expected
    assert len({kv_length_for(n) for n in range(2, 5000)}) == 12


def test_every_batch_size_has_the_same_shares_and_the_plain_step(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    config = DCutConfig(cost_table="off", ratios=(0.3, 0.9))
    with open_engine(tiny_llama(), PromptLookupDrafter(7), config, slots=5, prompt=4, longest=40) as engine:
        assert engine.costs is not None
        assert engine.stats.profile_seconds > 0
        assert {kv: {b: sorted(row) for b, row in rows.items()} for kv, rows in engine.costs.seconds.items()} == {
            16: {b: [b * eighths for eighths in (0, 1, 2, 3, 4, 6, 8)] for b in (1, 2, 4)}
        }


def test_measured_rows_are_as_ragged_as_real_ones() -> None:
    zeros, places = torch.zeros(4, dtype=torch.int64), torch.zeros(4, 8)
    batch = Batch(torch.arange(4), zeros, zeros, zeros + 8, zeros, zeros)
    drafts = _mixed_blocks(Drafts.chain(places.long(), places), batch)
    half, whole = (cut(score(drafts, batch), [ratio]).keep.sum(1).tolist() for ratio in (0.5, 1.0))
    assert half == sorted(half)
    assert half[0] < 3 < 6 < half[-1]
    assert whole == [8] * 4, "any number of places can be filled"


def test_a_table_that_is_handed_over_is_not_measured(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    table = CostTable.from_rows({1: {0: 1.0, 4: 1.0}}, draft_tokens=3)
    config = DCutConfig(cost_table=table)
    with open_engine(tiny_llama(), PromptLookupDrafter(3), config, slots=5, prompt=4, longest=40) as engine:
        assert engine.costs is table
        assert (engine.stats.profile_seconds, set(table.seconds)) == (0.0, {0})


@pytest.mark.parametrize("drafter", ["prompt lookup", "oracle", "dflash"])
def test_nothing_of_it_reaches_the_requests(tiny_llama: Callable[..., PreTrainedModel], drafter: str) -> None:
    model, prompt = tiny_llama(eos_token_id=None), [5, 6, 7, 5, 6]
    shape = {"taps": [0, 2], "mask_token_id": 3, "block_size": 4, "layers": 1, "dtype": torch.float64}
    own = {
        "prompt lookup": PromptLookupDrafter(3),
        "oracle": OracleDrafter({tuple(prompt): [7] * 20}, 3),
        "dflash": DFlashDrafter.random(model.config, **shape),
    }[drafter]
    table = CostTable.from_rows({2: {0: 2.0, 2: 1.0, 8: 1.0}}, draft_tokens=3)
    runs = []
    for where in ("off", table):
        # Without following what steps take, both runs decide alike as long as drafting pays.
        config = DCutConfig(budget="auto", ratios=(1.0,), draft_tokens=3, cost_table=where, deterministic=True)
        request = Request(id=0, prompt=prompt, max_new_tokens=12)
        with open_engine(model, own, config, slots=2, prompt=5, longest=17, stats=Stats(records=[])) as engine:
            engine.skip.drafts_next = lambda: True  # type: ignore[union-attr, method-assign]
            list(engine.run([request]))
            assert engine.stats.records is not None
            runs.append((request.tokens, [r.drafted for r in engine.stats.records], engine.stats.accepted))
    assert runs[0] == runs[1]
    assert sum(map(sum, runs[0][1])) > 0
