"""Stock models run packed rows, or say why they cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from torch._dynamo.utils import counters
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BloomConfig,
    Cohere2Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MptConfig,
    Olmo2Config,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    T5Config,
)

from hf_dcut.cache import LayerShape, SlotCache
from hf_dcut.lengths import check_length
from hf_dcut.packing import Chunk, join
from hf_dcut.target import Target
from hf_dcut.trial import check_model
from hf_dcut.types import Packed

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = ["sliding_attention", "full_attention"]
ROPE = {"rope_theta": 10000.0}
YARN = ROPE | {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 = ROPE | {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = ROPE | {"rope_type": "longrope", "factor": 16.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

FITTING: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama with yarn": lambda: LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama with its own rope scaling": lambda: LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "mistral with a window": lambda: MistralConfig(**SIZES, sliding_window=4),
    "gemma 2": lambda: Gemma2Config(
        **SIZES, head_dim=16, query_pre_attn_scalar=16, sliding_window=4, layer_types=MIXED, attn_logit_softcapping=5.0
    ),
    "gemma 3": lambda: Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=4, layer_types=MIXED),
    "cohere 2": lambda: Cohere2Config(**SIZES, sliding_window=4, layer_types=MIXED),
    "phi 3": lambda: Phi3Config(**SIZES),
    "phi 3 with longrope": lambda: Phi3Config(**SIZES, rope_parameters=LONG, original_max_position_embeddings=32),
    "olmo 2": lambda: Olmo2Config(**SIZES),
    "qwen 3.5": lambda: Qwen3_5TextConfig(**SIZES, head_dim=16, layer_types=["linear_attention", "full_attention"]),
    "gpt neox": lambda: GPTNeoXConfig(**SIZES),
    "gpt 2": lambda: GPT2Config(vocab_size=101, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2),
}
# Expert layers multiply in float32 at most on a CPU.
FITTING_FLOAT32 = {
    "qwen3 with experts": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, num_experts=4),
    "gpt oss": lambda: GptOssConfig(
        **SIZES, head_dim=16, num_local_experts=2, num_experts_per_tok=2, sliding_window=4, layer_types=MIXED
    ),
    "phi 3.5 with experts": lambda: PhimoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
}

# Config -> what the refusal names.
REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "encoder and decoder": (
        lambda: T5Config(vocab_size=101, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4),
        "encoder-decoder",
    ),
    "recurrent": (
        lambda: MambaConfig(vocab_size=101, hidden_size=64, num_hidden_layers=2, state_size=4),
        "recurrent state",
    ),
    "convolutions": (lambda: Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]), "layers of type conv"),
    "chunked attention": (
        lambda: Llama4TextConfig(**SIZES, head_dim=16, intermediate_size_mlp=64, num_local_experts=2),
        "layers of type chunked_attention",
    ),
    "dynamic rope": (
        lambda: LlamaConfig(**SIZES, rope_parameters=ROPE | {"rope_type": "dynamic", "factor": 2.0}),
        "dynamic RoPE",
    ),
    "alibi": (lambda: BloomConfig(vocab_size=101, hidden_size=64, n_layer=2, n_head=4), "cannot run packed rows"),
    "falcon with alibi": (
        lambda: FalconConfig(
            vocab_size=101,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            alibi=True,
            bos_token_id=1,
            eos_token_id=2,
        ),
        "cannot run packed rows",
    ),
    "a signature without keywords": (
        lambda: MptConfig(vocab_size=101, d_model=64, n_layers=2, n_heads=4),
        "cannot run packed rows",
    ),
}


def build(config: PreTrainedConfig, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind.from_config(config, dtype=dtype).eval()


@pytest.mark.parametrize("config", FITTING.values(), ids=FITTING)
def test_fitting_models(config: Callable[[], PreTrainedConfig]) -> None:
    check_model(build(config()))


@pytest.mark.parametrize("config", FITTING_FLOAT32.values(), ids=FITTING_FLOAT32)
def test_fitting_models_in_float32(config: Callable[[], PreTrainedConfig]) -> None:
    check_model(build(config(), torch.float32))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_stock_models_own_attention_does_not_matter(attention: str) -> None:
    config = LlamaConfig(**SIZES, attn_implementation=attention)
    check_model(build(config))


def test_a_window_that_only_the_masks_know_is_kept() -> None:
    model = build(FITTING_FLOAT32["phi 3.5 with experts"](), torch.float32)
    assert {shape.window for shape in Target(model).shapes} == {4}


def test_a_window_that_differs_from_the_caches_is_refused() -> None:
    model = build(MistralConfig(**SIZES, sliding_window=4))
    for layer in model.model.layers:
        layer.self_attn.config = MistralConfig(**SIZES, sliding_window=100)
        layer.self_attn.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match=r"sliding_window=100 .*window of 4.*Generate without dcut"):
        check_model(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_fit_too(tiny_llama: Callable[..., PreTrainedModel], dtype: torch.dtype) -> None:
    check_model(tiny_llama(dtype))


@pytest.mark.parametrize(("config", "named"), REFUSED.values(), ids=REFUSED)
def test_models_that_are_refused(config: Callable[[], PreTrainedConfig], named: str) -> None:
    model = build(config(), torch.float32)
    with pytest.raises(ValueError, match=f"{named}.*[Ww]ithout dcut"):
        check_model(model)
    with pytest.raises(ValueError, match=named):
        check_model(model)  # not remembered as fitting


def test_autocast_over_wider_weights_is_refused(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    named = r"keys and values of several dtypes \(torch.bfloat16, torch.float32\).*outside of it"
    model, wrapped = tiny_llama(torch.float32), tiny_llama(torch.float32)
    check_model(model)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=named):
        check_model(model)  # also where it was found to fit without
    wrapped.forward = torch.autocast("cpu", torch.bfloat16)(wrapped.forward)
    with pytest.raises(ValueError, match=named):
        check_model(wrapped)


def test_autocast_to_the_weights_own_dtype_fits(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        check_model(tiny_llama(torch.bfloat16))


def test_a_model_on_several_devices_is_refused(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    model = tiny_llama()
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    with pytest.raises(ValueError, match=r"spread over devices \['0', '1'\] by device_map.*tp_size=N"):
        check_model(model)


def test_a_device_map_of_one_device_is_none(tiny_folder: Path) -> None:
    maps = (None, {"": "cpu"})
    plain, mapped = (AutoModelForCausalLM.from_pretrained(tiny_folder, device_map=where) for where in maps)
    texts = [
        model.generate(torch.tensor([[5, 6, 7]]), prompt_lookup_num_tokens=3, dcut=dcut, do_sample=False)
        for model, dcut in ((plain, "none"), (mapped, 0.5))
    ]
    assert torch.equal(*texts)


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_offloaded_weights_are_refused(tiny_llama: Callable[..., PreTrainedModel], tmp_path: Path, place: str) -> None:
    model = tiny_llama()
    if place == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"has weights that are offloaded to memory or disk.*load it whole on one"):
        model.generate(torch.tensor([[5, 6, 7]]), prompt_lookup_num_tokens=3, dcut=0.5, do_sample=False)


def test_attention_that_ignores_the_interface_is_found_by_its_numbers(
    tiny_llama: Callable[..., PreTrainedModel],
) -> None:
    model = tiny_llama()
    attention = type(model.model.layers[0].self_attn)

    class Blind(attention):  # type: ignore[misc, valid-type]
        """Every token sees itself alone."""

        def forward(self, hidden_states: torch.Tensor, **others: Any) -> tuple[torch.Tensor, None]:
            cache, index = others["cache"], self.layer_idx
            value = self.v_proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            cache.update(value, value, index, kwargs=others)
            return self.o_proj(value.repeat_interleave(2, 1).transpose(1, 2).flatten(2)) * len(hidden_states[0]), None

    for layer in model.model.layers:
        layer.self_attn.__class__ = Blind
    with pytest.raises(ValueError, match=r"gives other logits for packed rows.*Generate without dcut"):
        check_model(model)


def test_a_model_is_checked_once(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    model, runs = tiny_llama(), []
    model.model.register_forward_hook(lambda *_: runs.append(1))
    check_model(model)
    checked = len(runs)
    assert Target(model).shapes == (LayerShape(2, 16, 2, 16),) * 3
    assert len(runs) == checked


def test_the_check_leaves_the_model_as_it_was(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    model = tiny_llama()
    before, state = model.config.to_dict(), torch.random.get_rng_state()
    check_model(model)
    assert model.config.to_dict() == before
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_prompt_beyond_the_models_positions(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    model = tiny_llama(max_position_embeddings=16)
    check_length(model, 16, 40)
    with pytest.raises(ValueError, match="prompt has 17 tokens but the model has 16 positions"):
        check_length(model, 17, 20)


def test_longrope_beyond_its_first_length() -> None:
    model = build(FITTING["phi 3 with longrope"]())
    check_length(model, 10, 32)
    with pytest.raises(ValueError, match=r"up to 33 tokens go past 32 positions.*longrope.*max_new_tokens"):
        check_length(model, 10, 33)


def prompts_row(prompts: list[list[int]]) -> Packed:
    """Returns a packed row that reads whole prompts, with all logits wanted."""
    empty = torch.zeros(0, dtype=torch.int64)
    start = torch.zeros(1, dtype=torch.int32)
    nobody = Packed(empty, empty, empty, empty, empty, start, empty.int(), empty, decoding=0, slots=0, reach=0, width=1)
    row = join(nobody, [Chunk(torch.tensor(p), slot, 0, 0, True) for slot, p in enumerate(prompts)])
    fields = {name: getattr(row, name) for name in Packed.__dataclass_fields__}
    return Packed(**fields | {"logit_rows": torch.arange(len(row))})


PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12]]
SLACK = 1e-10  # float64 in another order of summation


def make_cache(target: Target) -> SlotCache:
    return SlotCache(target.shapes, slots=3, length=8, dtype=target.dtype, device="cpu")


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("taps", [(0,), (1, 0), (0, 1, 1)])
def test_taps_are_the_outputs_of_their_layers(
    make_target: Callable[..., PreTrainedModel], kind: str, taps: tuple[int, ...]
) -> None:
    model = make_target(kind)
    with torch.no_grad(), Target(model, taps) as target:
        _, tapped = target.forward(prompts_row(PROMPTS), make_cache(target))
        plain = [model(torch.tensor([prompt]), output_hidden_states=True).hidden_states for prompt in PROMPTS]
    assert tapped is not None
    expected = torch.cat([torch.cat([states[tap + 1][0] for tap in taps], dim=-1) for states in plain])
    assert torch.allclose(tapped, expected, rtol=SLACK, atol=SLACK)


def test_logits_are_those_of_the_wanted_rows(tiny_qwen3: Callable[..., PreTrainedModel]) -> None:
    model = tiny_qwen3()
    with torch.no_grad(), Target(model) as target:
        logits, tapped = target.forward(prompts_row(PROMPTS), make_cache(target))
        plain = torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
    assert tapped is None
    assert torch.allclose(logits, plain, rtol=SLACK, atol=SLACK)


def test_parts_without_attention_may_be_compiled_for_rows_of_any_number(
    tiny_qwen3: Callable[..., PreTrainedModel],
) -> None:
    model, rows = tiny_qwen3(), [prompts_row(PROMPTS[:n]) for n in (3, 1, 2)]
    with torch.no_grad(), Target(model) as target:
        expected = [target.forward(row, make_cache(target))[0] for row in rows]
        for layer in model.model.layers:
            for part in (layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
                part.compile(dynamic=True, backend="eager")
        counters.clear()
        for row, wanted in zip(rows, expected, strict=True):
            assert torch.equal(target.forward(row, make_cache(target))[0], wanted)
    assert counters["stats"]["unique_graphs"] == 2, "one for all norms, one for all MLPs"
    assert not counters["graph_break"]


def hooks(model: PreTrainedModel) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_hooks_are_gone_afterwards(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    model = tiny_llama()
    with Target(model, (0, 1, 1)):
        assert hooks(model) == 2
    assert hooks(model) == 0
    with pytest.raises(RuntimeError, match="inside"), Target(model, (0, 1)):
        raise RuntimeError("inside")
    assert hooks(model) == 0


def test_hooks_collect_nothing_from_plain_forwards(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    model = tiny_llama()
    with torch.no_grad(), Target(model, (0,)) as target:
        model(torch.tensor([[3, 4, 5]]))
        _, tapped = target.forward(prompts_row(PROMPTS), make_cache(target))
    assert tapped is not None
    assert tapped.shape == (8, 64)
