"""The product: with dcut, `generate` says exactly what it says without.

Random models in float64, where packed and padded rows agree to the last few bits, so that no token may differ. Each
test compares with plain `generate` of the same batch.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MistralConfig, PreTrainedModel

from hf_dcut import CostTable, DCutConfig, DCutOutput, OracleDrafter, PromptLookupDrafter
from hf_dcut.config import PAPER_RATIOS, RATIOS
from hf_dcut.drafters import DFlashDrafter
from hf_dcut.drafters.base import Drafter

Inputs = dict[str, torch.Tensor]
D, NEW = 4, 24
PROFILES = {"oracle": (1.0,), "wrong oracle": (0.0,), "moody oracle": (0.1, 0.6, 1.0), "torn oracle": (0.0, 1.0)}
DRAFTERS = ("dflash", "prompt lookup", "oracle", "wrong oracle", "moody oracle")
BUDGETS = ("auto", 1.0, 0.75, 0.5, 0.25)
BATCHES = (1, 2, 3, 5, 8, 17, 33)
KINDS = ("llama", "qwen3")


def invented_costs(depth: int = D) -> CostTable:
    """Returns a table in which drafting pays when a good half of the drafts hold, and more rows cost more."""
    rows = {}
    for requests in (1, 2, 4, 8, 16, 32):
        full = requests * (depth + 1)
        rows[requests] = {0: 1.0} | {round(r * full): 1.2 + r * requests / 16 for r in (0.25, 0.5, 0.75, 1.0)}
    return CostTable.from_rows(rows, depth)


class Case:
    """Models with their prompts and what plain `generate` says, each made once."""

    def __init__(self, make_target: Callable[..., PreTrainedModel], make_prompts: Callable[..., Inputs]):
        self.make_target, self.make_prompts = make_target, make_prompts
        self.models: dict[str, PreTrainedModel] = {}
        self.texts: dict[tuple[str, int, int], tuple[Inputs, torch.Tensor]] = {}

    def model(self, kind: str) -> PreTrainedModel:
        if kind not in self.models:
            self.models[kind] = self.make_target(kind, eos_token_id=None)
        return self.models[kind]

    def plain(self, kind: str, rows: int, seed: int = 0) -> tuple[Inputs, torch.Tensor]:
        """Returns prompts and int64 [rows, width + NEW]."""
        if (kind, rows, seed) not in self.texts:
            inputs = self.make_prompts(rows, seed)
            tokens = self.model(kind).generate(**inputs, do_sample=False, max_new_tokens=NEW)
            self.texts[kind, rows, seed] = inputs, tokens
        return self.texts[kind, rows, seed]

    def drafter(self, name: str, kind: str, rows: int, seed: int = 0) -> Drafter:
        if name == "dflash":
            return random_dflash(self.model(kind))
        if name == "prompt lookup":
            return PromptLookupDrafter(D)
        return knowing(*self.plain(kind, rows, seed), PROFILES[name])

    def run(
        self, kind: str, rows: int, drafter: Drafter | str | None, dcut: Any, seed: int = 0, **options: Any
    ) -> DCutOutput:
        if isinstance(drafter, str):
            drafter = self.drafter(drafter, kind, rows, seed)
        inputs, _ = self.plain(kind, rows, seed)
        return generate(self.model(kind), inputs, drafter, dcut, **options)


def generate(model: PreTrainedModel, inputs: Inputs, drafter: Drafter | None, dcut: Any, **options: Any) -> DCutOutput:
    options = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True, **options}
    if dcut == "auto":
        dcut = DCutConfig(cost_table=invented_costs(), deterministic=True)
    return model.generate(**inputs, assistant_model=drafter, dcut=dcut, **options)


def random_dflash(model: PreTrainedModel, depth: int = D) -> DFlashDrafter:
    shape = {"taps": [0, 2], "mask_token_id": 3, "block_size": depth + 1, "layers": 2, "dtype": model.dtype}
    return DFlashDrafter.random(model.config, **shape)


def knowing(inputs: Inputs, tokens: torch.Tensor, profile: Sequence[float], depth: int = D) -> OracleDrafter:
    """Returns an oracle that knows what plain `generate` said to these prompts."""
    width = inputs["input_ids"].shape[1]
    rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), tokens[:, width:].tolist(), strict=True)
    return OracleDrafter({tuple(ids[mask].tolist()): text for ids, mask, text in rows}, depth, profile)


def check_stats(output: DCutOutput, new_tokens: int) -> None:
    """Asserts what always holds of the counts."""
    stats = output.stats
    assert stats is not None
    assert stats.new_tokens == new_tokens
    assert sum(stats.histogram.values()) == stats.rows
    assert sum(accepted * count for accepted, count in stats.histogram.items()) == stats.accepted_tokens
    assert stats.accepted_tokens <= stats.kept <= stats.drafted
    assert stats.rows <= stats.committed_tokens <= stats.accepted_tokens + stats.rows
    assert sum(map(sum, stats.kept_depths)) == stats.kept
    assert stats.steps == stats.drafted_steps + stats.plain_steps == len(stats.kept_depths)


@pytest.fixture(scope="module")
def case(make_target: Callable[..., PreTrainedModel], make_prompts: Callable[..., Inputs]) -> Case:
    return Case(make_target, make_prompts)


def covering() -> list[tuple[str, int, Any, str]]:
    """Returns every batch size with every budget and drafter; models alternate so that each meets all of them."""
    cells = product(enumerate(BATCHES), enumerate(BUDGETS), enumerate(DRAFTERS))
    every = [(KINDS[(i + j + k) % 2], rows, budget, drafter) for (i, rows), (j, budget), (k, drafter) in cells]
    return every + [(KINDS[i % 2], rows, "none", "dflash") for i, rows in enumerate(BATCHES)]


@pytest.mark.parametrize(("kind", "rows", "budget", "drafter"), covering())
def test_every_token_is_that_of_plain_generate(case: Case, kind: str, rows: int, budget: Any, drafter: str) -> None:
    output = case.run(kind, rows, drafter, budget)
    assert torch.equal(output.sequences, case.plain(kind, rows)[1])
    check_stats(output, new_tokens=rows * NEW)
    assert (output.stats.drafted > 0) == (budget != "none")


def test_auto_chooses_and_skips(case: Case) -> None:
    moods = {(rows, name): case.run("llama", rows, name, "auto").stats for rows in (1, 8, 33) for name in PROFILES}
    chosen = {ratio for stats in moods.values() for ratio in stats.budgets}
    assert chosen <= set(RATIOS)
    assert {0.25, 0.5, 1.0} <= chosen
    assert len(chosen - set(PAPER_RATIOS)) > 3
    assert moods[1, "oracle"].plain_steps == 0
    assert moods[33, "wrong oracle"].plain_steps > moods[33, "wrong oracle"].drafted_steps


@pytest.mark.parametrize("kind", KINDS)
def test_one_request_is_cut_to_nothing_while_another_keeps_all(case: Case, kind: str) -> None:
    # Of two rows of five positions six are verified: both anchors, and the four drafts of the sure request.
    output = case.run(kind, 2, "torn oracle", 0.6)
    assert torch.equal(output.sequences, case.plain(kind, 2)[1])
    assert {(0, D), (D, 0)} <= {tuple(kept) for kept in output.stats.kept_depths}


@pytest.mark.parametrize("rows", [3, 8, 17])
@pytest.mark.parametrize("budget", [0.25, 0.5, 1.0])
def test_blocks_of_sixteen(case: Case, rows: int, budget: float) -> None:
    kind, depth = "llama" if rows == 8 else "qwen3", 15
    inputs, tokens = case.plain(kind, rows)
    for drafter in (random_dflash(case.model(kind), depth), knowing(inputs, tokens, PROFILES["torn oracle"], depth)):
        output = generate(case.model(kind), inputs, drafter, budget)
        assert torch.equal(output.sequences, tokens)
    if budget < 1:
        # Long tails, which attention takes apart from the rest.
        assert any(min(kept) == 0 and max(kept) >= 6 for kept in output.stats.kept_depths)


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_token_at_every_offset_of_a_block(case: Case, kind: str) -> None:
    rows, seed = 3, 2 if kind == "llama" else 1
    inputs, tokens = case.plain(kind, rows, seed)
    width = inputs["input_ids"].shape[1]
    offsets = set()
    for end in tokens[0, width : width + 2 * (D + 1) + 1].tolist():
        ending = {"eos_token_id": end, "pad_token_id": 0}
        plain = case.model(kind).generate(**inputs, do_sample=False, max_new_tokens=NEW, **ending)
        output = case.run(kind, rows, "oracle", 1.0, seed, **ending)
        assert torch.equal(output.sequences, plain)
        place = tokens[0, width:].tolist().index(end)
        assert output.stats.finish_reasons[0] == "eos"
        # The first token comes with the prompt, then each step commits a block: drafts, and one more.
        offsets.add((place - 1) % (D + 1) if place else None)
    assert offsets == {None, *range(D + 1)}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_several_end_tokens_end_rows_at_different_places(case: Case, drafter: str) -> None:
    rows, (inputs, tokens) = 8, case.plain("llama", 8)
    width = inputs["input_ids"].shape[1]
    ending = {"eos_token_id": [tokens[row, width + 2 * row + 1].item() for row in range(rows)], "pad_token_id": 0}
    plain = case.model("llama").generate(**inputs, do_sample=False, max_new_tokens=NEW, **ending)
    output = case.run("llama", rows, drafter, 0.5, **ending)
    assert torch.equal(output.sequences, plain)
    lengths = {(row != 0).sum().item() for row in plain[:, width:]}
    assert len(lengths) >= 4, "rows end at different steps, and others move into their slots"


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("count", [1, 2, 3, D + 1, D + 2])
def test_few_tokens(case: Case, drafter: str, count: int) -> None:
    output = case.run("qwen3", 3, drafter, 1.0, max_new_tokens=count)
    width = output.sequences.shape[1] - count
    assert torch.equal(output.sequences, case.plain("qwen3", 3)[1][:, : width + count])
    check_stats(output, new_tokens=3 * count)


@pytest.mark.parametrize("drafter", ["dflash", "prompt lookup"])
@pytest.mark.parametrize(("kind", "at_once"), [("llama", 1), ("qwen3", 7), ("llama", 33)])
def test_prompts_longer_than_a_step_reads(case: Case, drafter: str, kind: str, at_once: int) -> None:
    model, inputs = case.model(kind), case.make_prompts(6, seed=5, longest=40)
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=NEW)
    config = DCutConfig(budget=0.5, max_prefill_tokens=at_once)
    output = generate(model, inputs, case.drafter(drafter, kind, 6), config)
    assert torch.equal(output.sequences, plain)
    together = [record for record in output.stats.records if record.requests and record.total > len(record.requests)]
    assert together, "some requests decoded while others still read"


@pytest.mark.parametrize("drafter", ["dflash", "oracle"])
def test_fewer_draft_tokens_than_the_block(case: Case, drafter: str) -> None:
    output = case.run("llama", 5, drafter, DCutConfig(budget=1.0, draft_tokens=3))
    assert torch.equal(output.sequences, case.plain("llama", 5)[1])
    assert max(map(max, output.stats.kept_depths)) == 3


WINDOWED = {
    "mistral": (MistralConfig, {"sliding_window": 6}),
    "gemma 3": (Gemma3TextConfig, {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}),
}


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("drafter", ["dflash", "prompt lookup", "moody oracle"])
def test_windows_shorter_than_the_text(case: Case, name: str, drafter: str) -> None:
    kind, special = WINDOWED[name]
    sizes = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = kind(**sizes, **heads, **special, pad_token_id=0, bos_token_id=1, eos_token_id=None)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    inputs = case.make_prompts(5, seed=3, longest=20)
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=NEW)
    own = {"dflash": random_dflash, "prompt lookup": lambda _: PromptLookupDrafter(D)}
    proposer = own[drafter](model) if drafter in own else knowing(inputs, plain, PROFILES[drafter])
    for config in (0.5, DCutConfig(budget=1.0, max_prefill_tokens=9)):
        assert torch.equal(generate(model, inputs, proposer, config).sequences, plain)


def test_threads_share_a_model_and_a_drafter(case: Case) -> None:
    model, drafter = case.model("llama"), case.drafter("dflash", "llama", 5)
    texts = [case.plain("llama", rows) for rows in (5, 3, 2)]

    def with_dcut(text: tuple[Inputs, torch.Tensor]) -> bool:
        return all(torch.equal(generate(model, text[0], drafter, 0.5).sequences, text[1]) for _ in range(4))

    def without(text: tuple[Inputs, torch.Tensor]) -> bool:
        options = {"do_sample": False, "max_new_tokens": NEW}
        return all(torch.equal(model.generate(**text[0], **options), text[1]) for _ in range(8))

    with ThreadPoolExecutor(3) as threads:
        jobs = [threads.submit(run, text) for run, text in zip((with_dcut, with_dcut, without), texts, strict=True)]
        assert [job.result() for job in jobs] == [True] * 3
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("drafter", ["dflash", "prompt lookup"])
def test_measuring_costs_leaves_no_trace_in_the_text(case: Case, drafter: str) -> None:
    output = case.run("qwen3", 5, drafter, DCutConfig(cost_table="off"))
    assert output.stats.profile_seconds > 0
    assert torch.equal(output.sequences, case.plain("qwen3", 5)[1])


def test_memory_that_was_never_written_is_never_read(case: Case, poisoned_memory: None) -> None:
    output = case.run("llama", 5, "dflash", DCutConfig(budget=0.5, max_prefill_tokens=4))
    assert torch.equal(output.sequences, case.plain("llama", 5)[1])


def test_in_float32(make_target: Callable[..., PreTrainedModel], case: Case) -> None:
    model, inputs = make_target("llama", torch.float32, eos_token_id=None), case.make_prompts(5)
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=NEW)
    assert torch.equal(generate(model, inputs, random_dflash(model), 0.5).sequences, plain)


def test_the_sums_of_a_perfect_drafter(case: Case) -> None:
    rows = 5
    output = case.run("llama", rows, "oracle", 1.0)
    stats = output.stats
    check_stats(output, new_tokens=rows * NEW)
    # One token comes with the prompt; then five a step, until three remain, of which two are drafts.
    assert stats.histogram == {D: 4 * rows, 2: rows}
    assert (stats.steps, stats.plain_steps, stats.committed_tokens) == (5, 0, rows * (NEW - 1))
    assert stats.mean_accepted_tokens == (NEW - 1) / 5
    assert stats.kept_share == (4 * 5 + 3) / 25
    assert stats.prompt_tokens == case.plain("llama", rows)[0]["attention_mask"].sum()
    assert stats.finish_reasons == ["length"] * rows
    assert stats.seconds >= sum(stats.stage_seconds.values()) > 0
    assert "4.60 tokens a request" in str(stats)


def test_the_sums_of_a_useless_drafter(case: Case) -> None:
    output = case.run("llama", 3, "wrong oracle", 1.0)
    assert (output.stats.accepted_tokens, output.stats.mean_accepted_tokens) == (0, 1.0)
    assert output.stats.kept > 0


def test_calls_leave_nothing_behind(case: Case) -> None:
    model, drafter = case.model("llama"), case.drafter("dflash", "llama", 3)
    before = model.config.to_dict(), model.generation_config.to_dict(), torch.random.get_rng_state().tolist()

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    case.run("llama", 3, drafter, "auto")
    alive = tensors()
    for _ in range(3):
        case.run("llama", 3, drafter, "auto")
    assert tensors() == alive
    assert not any(module._forward_hooks for module in model.modules())
    assert (model.config.to_dict(), model.generation_config.to_dict(), torch.random.get_rng_state().tolist()) == before


def test_a_model_can_go_once_it_was_used(make_target: Callable[..., PreTrainedModel], case: Case) -> None:
    model = make_target("llama", eos_token_id=None)
    generate(model, case.make_prompts(2), random_dflash(model), 0.5)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
