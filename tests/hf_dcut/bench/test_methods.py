"""Every method gives the target's answers, ours and upstream's."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_dcut.bench.drafter import make_drafter
from hf_dcut.bench.methods import Setting, applies, check_method, requests_of, shorter
from hf_dcut.bench.peers import PEERS, SINGLE
from hf_dcut.bench.runner import load
from hf_dcut.bench.running import in_turns, run
from hf_dcut.cache import SlotCache
from hf_dcut.cost_table import CostTable
from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.engine import Engine
from hf_dcut.requests import Request

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14], [15, 16]]
NEW = 10


@pytest.fixture(scope="module")
def setting(make_target: Callable[..., PreTrainedModel]) -> Setting:
    model = make_target("llama", dtype=torch.float32)
    drafter = make_drafter("oracle", model, PROMPTS, NEW)
    costs = CostTable.from_rows({2: {0: 1.0, 2: 1.0, 8: 1.1, 16: 1.2, 24: 1.3, 32: 1.4}}, draft_tokens=15)
    return Setting(model, drafter, 2, NEW, 4, costs=costs, assistant=model)


@pytest.fixture(scope="module")
def answers(setting: Setting) -> list[list[int]]:
    """Each prompt alone, by plain `generate`."""
    said = []
    for prompt in PROMPTS:
        rows = setting.model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
        said.append(rows[0, len(prompt) :].tolist())
    return said


@pytest.mark.parametrize("method", ["plain", "auto", "1.0", "0.25", "uniform-2", "tetris-6", "threshold-0.5"])
def test_ours(method: str, setting: Setting, answers: Sequence[list[int]]) -> None:
    outcome = run(method, setting, PROMPTS)
    assert outcome.sequences == list(answers)
    assert outcome.tokens == sum(map(len, answers))
    assert outcome.stats is not None
    assert outcome.stats.new_tokens == outcome.tokens
    assert 0 < outcome.first_token < outcome.seconds
    assert outcome.peak_bytes is None or outcome.peak_bytes > 1 << 20


def test_methods_in_turns_say_the_same_and_each_has_its_own_seconds(
    setting: Setting, answers: Sequence[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Laying out weights is charged to all of them.
    monkeypatch.setattr("hf_dcut.bench.running.prepacked", lambda networks, wanted: nullcontext())
    begin = time.perf_counter()
    outcomes = in_turns(["plain", "auto", "1.0"], setting, PROMPTS)
    whole = time.perf_counter() - begin
    for method, outcome in outcomes.items():
        alone = run(method, setting, PROMPTS)
        assert outcome.sequences == list(answers), method
        assert outcome.stats is not None
        assert alone.stats is not None
        assert outcome.stats.new_tokens == alone.stats.new_tokens, method
        assert 0 < outcome.first_token < outcome.seconds, method
    assert sum(outcome.seconds for outcome in outcomes.values()) < whole


def test_the_next_step_is_that_of_the_method_that_is_behind(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding takes many steps for what verifying an oracle's drafts makes of one; both progress alike."""
    engines: list[Engine] = []
    ahead: list[int] = []
    step = Engine.step

    def watched(engine: Engine) -> list[Request]:
        if engine not in engines:
            engines.append(engine)
        least = min(other.stats.new_tokens for other in engines if other.busy)
        ahead.append(engine.stats.new_tokens - least)
        return step(engine)

    monkeypatch.setattr(Engine, "step", watched)
    outcomes = in_turns(["plain", "1.0"], setting, PROMPTS)
    plain, full = (outcome.stats.steps for outcome in outcomes.values() if outcome.stats is not None)
    assert plain > 3 * full
    assert set(ahead) == {0}


def test_a_warm_up_has_full_caches_and_few_tokens(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    make = SlotCache.__init__

    def watched(cache: SlotCache, shapes: Any, slots: int, length: int, *rest: Any) -> None:
        lengths.append(length)
        make(cache, shapes, slots, length, *rest)

    monkeypatch.setattr(SlotCache, "__init__", watched)
    assert [len(said) for said in run("plain", setting, PROMPTS, 2).sequences] == [2] * len(PROMPTS)
    assert lengths == [4 + NEW]


@pytest.mark.parametrize("method", ["generate", "assisted", "prompt-lookup", "generate-batch"])
def test_upstream(
    method: str, setting: Setting, answers: Sequence[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    # Upstream's assisted decoding calls its own `generate` in a way that it warns of.
    caplog.set_level(logging.ERROR, "transformers.generation.utils")
    one = replace(setting, batch=1) if method in SINGLE else setting
    outcome = run(method, one, PROMPTS)
    assert outcome.sequences == list(answers)
    assert outcome.stats is None
    assert 0 < outcome.first_token < outcome.seconds


@pytest.mark.slow
def test_upstream_compiled(setting: Setting, answers: Sequence[list[int]]) -> None:
    assert run("static-compile", setting, PROMPTS[:4]).sequences == list(answers[:4])


def test_an_end_token_ends_an_answer(make_target: Callable[..., PreTrainedModel], answers: Sequence[list[int]]) -> None:
    end = answers[0][4]
    model = make_target("llama", dtype=torch.float32, eos_token_id=end)
    setting = Setting(model, make_drafter("lookup", model), 2, NEW, 4)
    expected = [said[: said.index(end) + 1] if end in said else said for said in answers]
    assert len(expected[0]) <= 5
    for method in ("generate", "plain", "1.0", "generate-batch"):
        assert run(method, setting, PROMPTS).sequences == expected, method


def test_draws_depend_on_the_request_alone(setting: Setting) -> None:
    warm = replace(setting, temperature=0.7)
    plain = run("plain", warm, PROMPTS)
    assert run("1.0", warm, PROMPTS).sequences == plain.sequences
    assert run("plain", replace(warm, batch=3), PROMPTS).sequences == plain.sequences
    assert plain.sequences != run("plain", setting, PROMPTS).sequences
    assert len(requests_of(warm, PROMPTS)[0].processors or ()) == 1
    assert not requests_of(replace(setting, temperature=1.0), PROMPTS)[0].processors


def test_a_shorter_block_is_fed(make_target: Callable[..., PreTrainedModel], answers: Sequence[list[int]]) -> None:
    model = make_target("llama", dtype=torch.float32)
    drafter = make_drafter("random", model)
    assert isinstance(drafter, DFlashDrafter)
    less = shorter(drafter, 3)
    assert (less.draft_tokens, drafter.draft_tokens) == (3, 7)
    assert less.model.fc.weight is drafter.model.fc.weight
    setting = Setting(model, drafter, 2, NEW, 4, draft_tokens=3, short=(less, CostTable.from_rows({}, 3)))
    assert run("short-1.0", setting, PROMPTS).sequences == list(answers)
    with pytest.raises(ValueError, match="feed a shorter block, which a PromptLookupDrafter does not have"):
        shorter(make_drafter("lookup", model), 3)


def test_where_methods_run(setting: Setting) -> None:
    one = replace(setting, batch=1)
    assert [m for m in PEERS if applies(m, setting)] == ["generate", "static-compile", "generate-batch"]
    assert all(applies(m, one) for m in PEERS)
    assert not applies("short-auto", setting)


@pytest.mark.parametrize("method", ["fast", "short-fast", "uniform-x", "short-generate", "tree-fast"])
def test_unknown_methods_are_named(method: str) -> None:
    told = r"give plain, auto, .*short- or tree- before one of these, or one of generate, static"
    with pytest.raises(ValueError, match=told):
        check_method(method)


@pytest.mark.parametrize("method", ["tree-plain", "tree-uniform-3", "short-tree-auto"])
def test_trees_are_of_budgets(method: str) -> None:
    with pytest.raises(ValueError, match=f"method '{method}': tree- goes before auto or a budget"):
        check_method(method)
    check_method("tree-auto")
    check_method("tree-0.25")


def test_assisted_decoding_needs_an_assistant(setting: Setting) -> None:
    with pytest.raises(ValueError, match="give --assistant"):
        run("assisted", replace(setting, batch=1, assistant=None), PROMPTS)


def test_models_are_loaded_without_their_own_taste(folder: str, tmp_path: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.repetition_penalty = 1.3
    model.generation_config.top_k = 7
    model.generation_config.do_sample = True
    model.save_pretrained(tmp_path)
    loaded = load(str(tmp_path), "auto").generation_config
    assert (loaded.repetition_penalty, loaded.do_sample) in ((None, None), (1.0, False))
    assert (loaded.eos_token_id, loaded.pad_token_id) == (2, 0)
