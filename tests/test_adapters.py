"""Targets with PEFT adapters: with dcut they say what they say without; the drafter knows nothing of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packaging import version
from transformers import PreTrainedModel
from transformers.integrations.peft import MIN_PEFT_VERSION

import hf_dcut
from hf_dcut.assembly import fingerprint
from hf_dcut.drafters import DFlashDrafter
from hf_dcut.drafters.base import Drafter
from hf_dcut.target import Target

peft = pytest.importorskip("peft", reason="needs peft")
pytestmark = pytest.mark.extras

Inputs = dict[str, torch.Tensor]
D, NEW = 4, 20
# Weights of a LoRA that does something: PEFT begins with none.
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 32, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
WHERE: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "everything": {"target_modules": "all-linear", "use_dora": True},
    "head and embeddings": {"target_modules": ["lm_head", "embed_tokens"]},
    "a head of its own": {"target_modules": ["o_proj"], "modules_to_save": ["lm_head"]},
}


def lora(**options: Any) -> Any:
    return peft.LoraConfig(**LORA, **options)


WAYS: dict[str, Callable[[PreTrainedModel, Any], Any]] = {
    "PeftModel": lambda model, config: peft.get_peft_model(model, config),
    "injected": lambda model, config: peft.inject_adapter_in_model(config, model),
    "add_adapter": lambda model, config: model.add_adapter(config) or model,
}


def adapted(model: PreTrainedModel, config: Any, way: str = "PeftModel") -> Any:
    """Returns the model with a random adapter: in a `PeftModel`, or put into its layers by PEFT or Transformers."""
    if way == "add_adapter" and version.parse(peft.__version__) < version.parse(MIN_PEFT_VERSION):
        pytest.skip(f"model.add_adapter needs peft {MIN_PEFT_VERSION} or newer, and this is {peft.__version__}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return WAYS[way](model, config).eval()


def generate(model: Any, inputs: Inputs, **options: Any) -> torch.Tensor:
    return model.generate(**inputs, do_sample=False, max_new_tokens=NEW, eos_token_id=None, **options)


def random_dflash(model: PreTrainedModel) -> DFlashDrafter:
    shape = {"taps": [0, 2], "mask_token_id": 3, "block_size": D + 1, "layers": 2, "dtype": model.dtype}
    return DFlashDrafter.random(model.config, draft_ids=range(0, 101, 2), **shape)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", WHERE)
def test_greedy_text_is_that_of_the_adapted_model(
    tiny_llama: Callable[..., PreTrainedModel],
    inputs: Inputs,
    knowing: Callable[..., Drafter],
    where: str,
    way: str,
) -> None:
    base = tiny_llama()
    unadapted = generate(base, inputs, dcut="none")  # the model is known before its adapter
    model = adapted(base, lora(**WHERE[where]), way)
    plain = generate(model, inputs)
    assert not torch.equal(plain, unadapted)
    for drafter in (random_dflash(base), knowing(inputs, plain)):
        assert torch.equal(generate(model, inputs, assistant_model=drafter, dcut=0.5), plain)
    if way == "PeftModel":
        with model.disable_adapter():
            assert torch.equal(generate(model, inputs, assistant_model=random_dflash(base), dcut=0.5), unadapted)


def test_several_adapters_merged_and_not(tiny_llama: Callable[..., PreTrainedModel], inputs: Inputs) -> None:
    base = tiny_llama()
    drafter, texts = random_dflash(base), []
    model = adapted(base, lora(target_modules=["q_proj"]))
    model.add_adapter("other", lora(target_modules=["down_proj"]))
    for change in (
        lambda: model.set_adapter("default"),
        lambda: model.set_adapter("other"),
        lambda: model.merge_adapter(),
        lambda: model.unmerge_adapter(),
        lambda: model.base_model.set_adapter(["default", "other"]),
    ):
        change()
        texts.append(generate(model, inputs))
        assert torch.equal(generate(model, inputs, assistant_model=drafter, dcut=0.5), texts[-1])
    first, second, merged, unmerged, both = texts
    assert torch.equal(second, merged)
    assert torch.equal(second, unmerged)
    assert not any(torch.equal(one, other) for one, other in ((first, second), (first, both), (second, both)))


def test_other_ways_in_take_a_peft_model_too(tiny_llama: Callable[..., PreTrainedModel], inputs: Inputs) -> None:
    model = adapted(tiny_llama(), lora(target_modules="all-linear"))
    drafter = random_dflash(model.get_base_model())
    plain = generate(model, inputs)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}
    assert torch.equal(hf_dcut.generate(model, **inputs, assistant_model=drafter, dcut=0.5, **options), plain)
    prompts = [
        ids[mask.bool()].tolist() for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    results = hf_dcut.generate_batch(
        model, prompts, assistant_model=drafter, dcut=0.5, max_batch_size=2, progress_bar=False, **options
    )
    width = inputs["input_ids"].shape[1]
    assert [r.generated_tokens for r in results.values()] == plain[:, width:].tolist()
    table = hf_dcut.warmup(model, drafter, [1], dcut={"cost_table": "off"}, max_length=32)
    assert table.plain(1) > 0


def test_step_costs_are_those_of_the_adapted_model(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    model = tiny_llama()
    drafter = random_dflash(model)
    bare = fingerprint(Target(model), drafter)
    adapted(model, lora(target_modules=["q_proj"]), "injected")
    assert "adapters" not in bare
    assert fingerprint(Target(model), drafter) == bare | {"adapters": ["default LORA 4"]}


def test_a_new_adapter_is_tried_out(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    model, runs = tiny_llama(), []
    Target(model)
    model.model.register_forward_hook(lambda *_: runs.append(1))
    Target(model)
    assert not runs
    adapted(model, lora(target_modules=["q_proj"]), "injected")
    Target(model)
    assert runs


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "prompt tuning": (
        lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "PROMPT_TUNING that puts learned states before each prompt",
    ),
    "prefix tuning": (
        lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "PREFIX_TUNING that puts learned states before each prompt",
    ),
    "activated lora": (
        lambda: lora(target_modules=["q_proj"], alora_invocation_tokens=[5, 6]),
        r"LORA that begins in the middle of each prompt \(alora_invocation_tokens\)",
    ),
}


@pytest.mark.parametrize(("config", "named"), REFUSED.values(), ids=REFUSED)
def test_adapters_that_are_refused(
    tiny_llama: Callable[..., PreTrainedModel], inputs: Inputs, config: Callable[[], Any], named: str
) -> None:
    base = tiny_llama(torch.float32)
    Target(base)
    model = adapted(base, config())
    for call in (model.generate, lambda **options: hf_dcut.generate(model, **options)):
        with pytest.raises(ValueError, match=f"adapter of type {named}.*without dcut"):
            call(**inputs, prompt_lookup_num_tokens=3, dcut=0.5)


def test_one_adapter_a_row_is_refused(tiny_llama: Callable[..., PreTrainedModel], inputs: Inputs) -> None:
    model = adapted(tiny_llama(), lora(target_modules=["q_proj"]))
    names = ["default", "__base__", "default", "default", "default"]
    with pytest.raises(ValueError, match="adapter_names"):
        generate(model, inputs, adapter_names=names, prompt_lookup_num_tokens=3, dcut=0.5)


def test_dropout_is_refused(tiny_llama: Callable[..., PreTrainedModel], inputs: Inputs) -> None:
    model = adapted(tiny_llama(), lora(target_modules=["q_proj"], lora_dropout=0.1))
    generate(model, inputs, prompt_lookup_num_tokens=3, dcut=0.5)
    model.train()
    with pytest.raises(ValueError, match=r"training mode and drops activations in .*lora_dropout.*model.eval\(\)"):
        generate(model, inputs, prompt_lookup_num_tokens=3, dcut=0.5)


def test_a_trained_adapter_counts_at_once(tiny_llama: Callable[..., PreTrainedModel], inputs: Inputs) -> None:
    base = tiny_llama()
    drafter = random_dflash(base)
    model = adapted(base, lora(target_modules="all-linear"))
    before = generate(model, inputs, assistant_model=drafter, dcut=0.5)
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    optimiser.step()
    plain = generate(model, inputs)
    assert not torch.equal(plain, before)
    assert torch.equal(generate(model, inputs, assistant_model=drafter, dcut=0.5), plain)
    merged = copy.deepcopy(model).merge_and_unload()
    assert torch.equal(generate(merged, inputs, assistant_model=drafter, dcut=0.5), plain)
