"""Warming up, the table's file, and what is refused before memory is taken."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

import hf_dcut
from hf_dcut.assembly import _draws_trees, fingerprint, open_engine, warmup
from hf_dcut.config import DCutConfig
from hf_dcut.cost_table import CostTable
from hf_dcut.drafters.best_of import BestOf
from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.drafters.prompt_lookup import PromptLookupDrafter
from hf_dcut.graphs import Graphs
from hf_dcut.memory import check_memory, size
from hf_dcut.target import Target

Builder = Callable[..., PreTrainedModel]
DRAFTER = PromptLookupDrafter(3)
SHORT = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
PROMPT = torch.tensor([[5, 6, 7, 5, 6]])


def refuse_to_measure(*_: Any) -> float:
    raise AssertionError("measured although everything is known")


def test_warmup_returns_a_table_and_writes_it(tiny_llama: Builder, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    table = warmup(tiny_llama(), DRAFTER, [4, 1], {"cost_table": path}, max_length=64)
    assert table.plain(1, 32) > 0
    assert table.drafted(4, 8, 32) > 0
    saved = json.loads(path.read_text())["seconds"]
    measured = {b: sorted(map(int, row)) for b, row in saved["32"].items()}
    assert measured == {"1": [0, 1, 2, 3, 4], "4": [0, 4, 6, 8, 12, 16]}
    assert "B = 4   plain" in str(table)


def test_the_next_call_finds_everything_in_the_file(
    tiny_llama: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"cost_table": tmp_path / "costs.json"}
    first = warmup(tiny_llama(), DRAFTER, [1], config, max_length=11)
    monkeypatch.setattr(CostTable, "measure", refuse_to_measure)
    again = warmup(tiny_llama(), DRAFTER, [1], config, max_length=11)
    assert again.seconds == first.seconds
    output = tiny_llama().generate(PROMPT, **SHORT, assistant_model=DRAFTER, dcut=config)
    assert output.stats.profile_seconds == 0.0


def test_the_table_can_be_handed_over(tiny_llama: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    table = warmup(tiny_llama(), DRAFTER, [1], {"cost_table": "off"}, max_length=64)
    monkeypatch.setattr(CostTable, "measure", refuse_to_measure)
    output = tiny_llama().generate(PROMPT, **SHORT, assistant_model=DRAFTER, dcut={"cost_table": table})
    assert (output.stats.profile_seconds, output.stats.new_tokens) == (0.0, 6)


def test_a_call_begins_where_the_last_one_ended(tiny_llama: Builder) -> None:
    model, other = tiny_llama(), PromptLookupDrafter(2)

    def balance(drafter: PromptLookupDrafter, ends: float, **options: Any) -> float:
        """Returns what a call begins with, and lets it end with another balance."""
        with open_engine(model, drafter, DCutConfig(cost_table="off", **options), 1, 5, 11) as engine:
            assert engine.skip is not None
            begins, engine.skip.balance = engine.skip.balance, ends
            return begins

    assert balance(DRAFTER, 1.5) == 0.0
    assert balance(other, -0.5) == 0.0
    assert balance(DRAFTER, 0.25, deterministic=True) == 0.0
    assert balance(PromptLookupDrafter(3), 1.0) == 1.5
    assert balance(other, 0.0) == -0.5
    model = tiny_llama()
    assert balance(DRAFTER, 0.0) == 0.0


def test_only_what_is_missing_is_measured(tiny_llama: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, asked = {"cost_table": tmp_path / "costs.json"}, []
    warmup(tiny_llama(), DRAFTER, [1], config, max_length=64)
    measure = CostTable.measure

    def spy(self: CostTable, missing: dict[int, list[int]], *others: Any) -> float:
        asked.append(missing)
        return measure(self, missing, *others)

    monkeypatch.setattr(CostTable, "measure", spy)
    warmup(tiny_llama(), DRAFTER, [1, 2], config, max_length=64)
    assert asked == [{2: [0, 2, 3, 4, 6, 8]}]


@pytest.mark.slow
def test_another_process_reuses_the_file(tmp_path: Path) -> None:
    script = """
import sys, torch, hf_dcut
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
torch.set_num_threads(1)
hf_dcut.timing.STEADY = float("inf")
sizes = dict(vocab_size=101, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=None)).eval()
lookup = dict(prompt_lookup_num_tokens=3, do_sample=False, max_new_tokens=6, return_dict_in_generate=True)
print(model.generate(torch.tensor([[5, 6, 7, 5, 6]]), **lookup, dcut=True).stats.profile_seconds)
"""
    environment = {**os.environ, "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    seconds = [
        float(subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True).stdout)
        for _ in range(2)
    ]
    assert seconds[0] > 0
    assert seconds[1] == 0
    (path,) = (tmp_path / "hf_dcut").iterdir()
    assert path.name.startswith("costs-")
    assert path.suffix == ".json"


@pytest.mark.parametrize("sizes", [[], [0], [-1, 4]])
def test_bad_batch_sizes_are_named(tiny_llama: Builder, sizes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"batch_sizes=.*positive integers"):
        warmup(tiny_llama(), DRAFTER, sizes)


@pytest.mark.parametrize("budget", ["none", 0.5])
def test_a_budget_without_a_table_is_told(tiny_llama: Builder, budget: Any) -> None:
    with pytest.raises(ValueError, match="needs no cost table: warm up with budget='auto'"):
        warmup(tiny_llama(), DRAFTER, [1], {"budget": budget})


def open_and_close(model: PreTrainedModel, drafter: Any, **options: Any) -> None:
    with open_engine(model, drafter, DCutConfig(budget=0.5, **options), slots=2, prompt=4, longest=10):
        pass


def test_memory_is_told_in_numbers_before_it_is_taken(tiny_llama: Builder, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama()
    # 3 layers of K and V of 2 heads of 16 float64, and 8 bytes for a token, in 2 slots of 10 + 3 cells.
    needed = 2 * 13 * (3 * 2 * 2 * 16 * 8 + 8)
    with caplog.at_level(logging.INFO, "hf_dcut"):
        open_and_close(model, DRAFTER, max_cache_bytes=needed)
    assert "2 slots of 13 cells take 39.0 KiB for the target and 208 bytes for the drafter" in caplog.text
    with pytest.raises(
        MemoryError, match=r"2 slots of 13 cells .* allowed by dcut max_cache_bytes: generate for fewer"
    ):
        open_and_close(model, DRAFTER, max_cache_bytes=needed - 1)


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1,024.0 KiB"),
        (2**20, "1.0 MiB"),
        (139 * 2**30, "139.0 GiB"),
        (5000 * 2**40, "5,000.0 TiB"),
    ],
)
def test_sizes_are_told_in_a_unit_that_shows_them(count: int, said: str) -> None:
    assert size(count) == said


def test_more_memory_than_there_is_is_refused(tiny_llama: Builder) -> None:
    with pytest.raises(MemoryError, match=r"[\d.]+ GiB are free on cpu"), Target(tiny_llama()) as target:
        check_memory(target, None, slots=10**6, length=10**6, limit=None)


def test_a_drafter_for_another_target_is_refused(tiny_llama: Builder) -> None:
    wide = tiny_llama(hidden_size=128)
    drafter = DFlashDrafter.random(wide.config, taps=[0], mask_token_id=3, block_size=4, layers=1)
    with pytest.raises(ValueError, match="hidden_size=128, but the target has 64"):
        open_and_close(tiny_llama(), drafter)


def test_more_draft_tokens_than_the_block_has_are_refused(tiny_llama: Builder) -> None:
    with pytest.raises(ValueError, match="draft_tokens=4: the drafter makes 3, give at most that"):
        open_and_close(tiny_llama(), DRAFTER, draft_tokens=4)


# Draft trees.


def dflash(model: PreTrainedModel, **features: Any) -> DFlashDrafter:
    shape = {"taps": [0], "mask_token_id": 3, "block_size": 4, "layers": 1, "dtype": model.dtype}
    return DFlashDrafter.random(model.config, **(shape | features))


def draws_trees(model: PreTrainedModel, drafter: Any, **options: Any) -> bool:
    with open_engine(model, drafter, DCutConfig(budget=0.5, **options), slots=2, prompt=4, longest=10) as engine:
        return engine.drafting.tree


WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
NO_TREES: dict[str, tuple[str, Any, dict[str, Any], dict[str, Any], str]] = {
    "prompt lookup": ("llama", lambda _: DRAFTER, {}, {}, "PromptLookupDrafter proposes chains"),
    "drawn drafts": ("llama", dflash, {}, {"proposals": "sampled"}, r"drawn drafts \(proposals='sampled'\) are chains"),
    "windows": ("qwen3", dflash, WINDOW, {}, "Qwen3ForCausalLM has recurrent or sliding layers"),
    "states": ("qwen3_5", dflash, {}, {}, "Qwen3_5ForCausalLM has recurrent or sliding layers"),
}


@pytest.mark.parametrize("name", NO_TREES)
def test_trees_that_cannot_be_are_told(make_target: Builder, name: str) -> None:
    kind, drafter, fields, options, told = NO_TREES[name]
    model = make_target(kind, **fields)
    with pytest.raises(ValueError, match=rf"^dcut draft_tree=True: {told}[^;]*\. Give 'auto' or False$"):
        draws_trees(model, drafter(model), draft_tree=True, **options)
    assert not draws_trees(model, drafter(model), **options)
    assert not draws_trees(model, drafter(model), **options, draft_tree=False)


def test_all_that_is_in_the_way_of_trees_is_told(make_target: Builder) -> None:
    model = make_target("qwen3_5")
    with pytest.raises(ValueError, match=r"PromptLookupDrafter proposes chains; drawn drafts .*; Qwen3_5ForCausalLM"):
        _draws_trees(DCutConfig(draft_tree=True, proposals="sampled"), Target(model), DRAFTER, None)
    target, graphs = Target(make_target("llama")), cast(Graphs, object())
    with pytest.raises(ValueError, match=r"^dcut draft_tree=True: steps recorded as CUDA graphs hold chains\. Give"):
        _draws_trees(DCutConfig(draft_tree=True), target, dflash(target.model), graphs)


def test_trees_where_they_can_be(tiny_llama: Builder) -> None:
    model = tiny_llama()
    for drafter in (dflash(model), BestOf([dflash(model), DRAFTER])):
        assert [draws_trees(model, drafter, draft_tree=wanted) for wanted in ("auto", True, False)] == [
            True,
            True,
            False,
        ]
    with open_engine(model, None, DCutConfig(budget="none", draft_tree=True), slots=2, prompt=4, longest=10) as engine:
        assert not engine.drafting.tree, "nothing is drafted"


def test_the_fingerprint_knows_target_drafter_and_dtype(tiny_llama: Builder, tiny_qwen3: Builder) -> None:
    def of(model: PreTrainedModel, drafter: Any = DRAFTER) -> str:
        with Target(model) as target:
            return json.dumps(fingerprint(target, drafter), sort_keys=True)

    base = of(tiny_llama())
    assert of(tiny_llama(seed=1)) == base, "other weights take the same time"
    others = [tiny_qwen3(), tiny_llama(torch.float32), tiny_llama(intermediate_size=64)]
    assert len({base, *map(of, others), of(tiny_llama(), PromptLookupDrafter(4))}) == 5


def test_warmup_is_a_public_name() -> None:
    assert hf_dcut.warmup is warmup
