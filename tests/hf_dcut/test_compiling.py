"""Compiled norms and MLPs: the same texts, one piece of code for all numbers of rows, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

import hf_dcut
from hf_dcut import compiling
from hf_dcut.assembly import fingerprint, open_engine
from hf_dcut.compiling import compiled, parts_of
from hf_dcut.config import DCutConfig
from hf_dcut.drafters.base import Drafter
from hf_dcut.drafters.best_of import BestOf
from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.drafters.prompt_lookup import PromptLookupDrafter
from hf_dcut.drafters.wrapping import Wrapped
from hf_dcut.ranks import Ranks
from hf_dcut.requests import Request
from hf_dcut.target import Target

D, END = 3, 43
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, 17], [18, 19, 20, 21]]
LENGTHS = [12, 1, 7, 2, 9]


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Counts what is compiled, and runs it as it is."""
    torch._dynamo.reset()
    backend = CompileCounter()
    monkeypatch.setattr(compiling, "BACKEND", backend)
    yield backend
    torch._dynamo.reset()


def all_compiled(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if part._compiled_call_impl is not None]


def dflash(model: PreTrainedModel) -> DFlashDrafter:
    shape = {"taps": [0, 2], "mask_token_id": 3, "block_size": D + 1, "layers": 2, "dtype": torch.float64}
    return DFlashDrafter.random(model.config, **shape)


def run(model: PreTrainedModel, drafter: Drafter, **options: Any) -> list[list[int]]:
    """Returns what is said after each prompt, after looking at what is compiled meanwhile."""
    config = DCutConfig(budget=0.6, compile=True, **options)
    requests = [Request(i, p, n, frozenset({END})) for i, (p, n) in enumerate(zip(PROMPTS, LENGTHS, strict=True))]
    with open_engine(model, drafter, config, 3, 7, 20) as engine:
        assert all_compiled(model) == [
            f"model.layers.{i}.{part}"
            for i in range(3)
            for part in ("mlp", "input_layernorm", "post_attention_layernorm")
        ]
        assert len(list(engine.run(requests))) == len(requests)
    return [request.tokens for request in requests]


def test_the_texts_are_the_targets_and_nothing_stays(
    counter: CompileCounter, tiny_llama: Callable[..., PreTrainedModel], said_alone: Callable[..., list[list[int]]]
) -> None:
    model = tiny_llama(eos_token_id=None)
    drafter, state = dflash(model), dict(vars(model.model.layers[0].mlp))
    expected = said_alone(model, PROMPTS, LENGTHS, END)
    assert run(model, drafter) == expected
    assert counter.frame_count > 0
    assert all_compiled(model) == all_compiled(drafter.model) == []
    assert vars(model.model.layers[0].mlp) == state
    assert said_alone(model, PROMPTS, LENGTHS, END) == expected


def test_steps_of_any_number_of_rows_share_what_was_compiled(
    counter: CompileCounter, tiny_llama: Callable[..., PreTrainedModel]
) -> None:
    """Norms and MLPs of all layers, for one row and for more; the drafter's MLP is of a class of its own."""
    model = tiny_llama(eos_token_id=None)
    drafter = dflash(model)
    run(model, drafter)
    first = counter.frame_count
    assert first <= 6, "a norm, the target's MLP and the drafter's, each for one row and for more"
    sizes = set()
    model.model.layers[0].register_forward_pre_hook(lambda module, given: sizes.add(given[0].shape[1]))
    for share in (0.25, 0.4, 0.5, 0.75, 1.0):
        with open_engine(model, drafter, DCutConfig(budget=share, compile=True), 5, 7, 20) as engine:
            requests = [Request(i, p, 12) for i, p in enumerate(PROMPTS)]
            assert len(list(engine.run(requests))) == len(requests)
    assert len(sizes) > 5
    assert counter.frame_count == first


def test_an_error_in_a_call_leaves_nothing_behind(
    counter: CompileCounter, tiny_llama: Callable[..., PreTrainedModel]
) -> None:
    model = tiny_llama()
    with pytest.raises(KeyError), open_engine(model, None, DCutConfig(budget="none", compile=True), 1, 4, 8):
        raise KeyError
    with pytest.raises(MemoryError):
        run(model, PromptLookupDrafter(D), max_cache_bytes=10)
    assert all_compiled(model) == []


def test_what_the_user_compiled_stays(counter: CompileCounter, tiny_llama: Callable[..., PreTrainedModel]) -> None:
    model = tiny_llama()
    own = model.model.layers[1].mlp
    own.compile(backend="eager")
    kept = own._compiled_call_impl
    run(model, PromptLookupDrafter(D))
    assert own._compiled_call_impl is kept
    assert all_compiled(model) == ["model.layers.1.mlp"]


def test_of_two_calls_at_once_the_last_one_lets_go(
    counter: CompileCounter, tiny_llama: Callable[..., PreTrainedModel]
) -> None:
    parts = parts_of(tiny_llama().model.layers)
    first, second = compiled(parts), compiled(parts)
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert all(part._compiled_call_impl is not None for part in parts)
    second.__exit__(None, None, None)
    assert all(part._compiled_call_impl is None for part in parts)


def test_attention_recurrence_and_experts_are_left_alone(make_target: Callable[..., PreTrainedModel]) -> None:
    kinds = {
        kind: sorted({type(part).__name__ for part in parts_of(make_target(kind).model.layers)})
        for kind in ("qwen3", "qwen3_5", "qwen3_next")
    }
    assert kinds == {
        "qwen3": ["Qwen3MLP", "Qwen3RMSNorm"],
        "qwen3_5": ["Qwen3_5MLP", "Qwen3_5RMSNorm"],
        "qwen3_next": ["Qwen3NextRMSNorm"],
    }


def test_of_a_drafters_layers_the_mlp_is_compiled(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    """Its norms are one kernel each, and its attention has no forward."""
    drafter = dflash(tiny_llama())
    assert [type(part).__name__ for part in parts_of(drafter.layers)] == ["Qwen3MLP"] * 2
    assert list(PromptLookupDrafter(D).layers) == []
    for several in (BestOf([PromptLookupDrafter(D), drafter]), Wrapped(drafter, lambda drafts, batch: drafts)):
        assert parts_of(several.layers) == parts_of(drafter.layers)


def test_adapters_inside_an_mlp_are_compiled_with_it(
    counter: CompileCounter, tiny_llama: Callable[..., PreTrainedModel]
) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_llama(eos_token_id=None), lora).eval()
    inputs = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 5]]), "do_sample": False, "max_new_tokens": 12}
    config = DCutConfig(budget=0.6, compile=True)
    found = hf_dcut.generate(model, **inputs, dcut=config, prompt_lookup_num_tokens=D)
    assert torch.equal(found, model.generate(**inputs))
    assert counter.frame_count > 0


def test_models_without_such_parts_are_refused() -> None:
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=101, n_positions=64)
    model = GPT2LMHeadModel._from_config(config).eval()
    with (
        pytest.raises(ValueError, match=r"compile=True: GPT2LMHeadModel shows no norms or MLPs .* Leave compile out"),
        open_engine(model, None, DCutConfig(budget="none", compile=True), 1, 4, 8),
    ):
        pass


def test_models_in_several_processes_are_refused(
    tiny_llama: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Target(tiny_llama()) as target:
        shared = Ranks()
        shared.size = 2
        monkeypatch.setattr(target, "ranks", shared)
        with (
            pytest.raises(ValueError, match="compile=True: LlamaForCausalLM is split over several processes"),
            compiling.compiling(DCutConfig(compile=True), target, None),
        ):
            pass


def test_compiled_steps_have_costs_of_their_own(
    counter: CompileCounter, tiny_llama: Callable[..., PreTrainedModel]
) -> None:
    drafter, model = PromptLookupDrafter(D), tiny_llama()
    with Target(model) as target:
        plain, fused = (fingerprint(target, drafter, compiled=c) for c in (False, True))
    assert plain != fused
    with open_engine(model, drafter, DCutConfig(compile=True, cost_table="off"), 1, 4, 30) as engine:
        assert engine.costs is not None
        assert engine.costs.fingerprint["compile"] is True


@pytest.mark.slow
def test_compiled_by_inductor(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    """Two requests at once, so that no step has a single row and a norm and an MLP are compiled once each."""
    torch._dynamo.reset()
    model = tiny_llama(torch.float32, eos_token_id=None)
    inputs = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 5]]), "do_sample": False, "max_new_tokens": 8}
    config = DCutConfig(budget=0.6, compile=True)
    counters.clear()
    found = hf_dcut.generate(model, **inputs, dcut=config, prompt_lookup_num_tokens=D)
    assert counters["stats"]["unique_graphs"] == 2
    assert torch.equal(found, model.generate(**inputs))
    torch._dynamo.reset()
