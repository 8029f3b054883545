"""The formats of published drafters: each family's config is read, and weights draft the same in any of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import MuseGlimmerAssistantConfig, PreTrainedModel, Qwen3Config
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantModel

from hf_dcut.drafters import AutoDrafter
from hf_dcut.drafters.dflash import DFlashConfig, DFlashDrafter, DFlashModel
from hf_dcut.drafters.dflash.dialects import DIALECTS, find
from hf_dcut.drafters.dflash.rope import Rope
from hf_dcut.types import Batch, Committed, Drafts

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("*.json"))
WEIGHT_NAMES = {
    "Muse Glimmer assistant": {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."},
    "AngelSpec": {"fc.": "context_proj.", "hidden_norm.": "context_norm.", "norm.": "final_norm."},
}


def fixture(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def random_weights(model: DFlashModel, seed: int = 0) -> dict[str, Tensor]:
    """Returns weights for a model, with norms around 1 and everything else around 0."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.arange(len(tensor)) * 2
        if name == "d2t"
        else torch.normal(float("norm" in name), 0.3, tensor.shape, generator=generator)
        for name, tensor in model.state_dict().items()
    }


def named(dialect: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights under the names that a format has for them."""
    renames = WEIGHT_NAMES.get(dialect, {})

    def theirs(name: str) -> str:
        return next((new + name.removeprefix(old) for old, new in renames.items() if name.startswith(old)), name)

    return {theirs(name): tensor for name, tensor in weights.items()}


def write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


@torch.no_grad()
def propose(drafter: DFlashDrafter, target: PreTrainedModel, context: int = 6, anchor: int = 9) -> Drafts:
    """Returns the drafts after a context of random taps, the same for drafters with the same taps and widths."""
    drafter.check(target)
    bound = drafter.bind(target, slots=1, length=context + drafter.draft_tokens + 2)
    cell, zeros = torch.arange(context), torch.zeros(context, dtype=torch.int64)
    width = len(drafter.taps) * drafter.config.hidden_size
    taps = torch.randn(context, width, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    bound.observe(Committed(zeros, cell, cell, zeros, taps.to(target.dtype), (), (), (), ()))
    one = torch.zeros(1, dtype=torch.int64)
    return bound.propose(Batch(one, one + context, one + anchor, one + 99, one, one))


# Every published family.


def test_there_is_a_fixture_for_every_format() -> None:
    formats = {find(fixture(path)["config"]).name for path in FIXTURES}
    assert formats == {dialect.name for dialect in DIALECTS}


def test_the_documentation_has_every_family_and_format() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "drafters.md").read_text()
    assert [dialect.name for dialect in DIALECTS if f"| {dialect.name} |" not in text] == []
    for content in map(fixture, FIXTURES):
        taps = ", ".join(map(str, content["expect"]["taps"]))
        assert f"| {content['family']} | {content['expect']['block_size']} | {taps} |" in text


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_a_published_family_is_read(make_target: Any, tmp_path: Path, path: Path) -> None:
    content = fixture(path)
    values, expect = content["config"], content["expect"]
    config = DFlashConfig.from_dict(values)
    assert find(values).name == expect["format"]
    assert list(config.target_layer_ids) == expect["taps"]
    assert (config.block_size, config.draft_tokens) == (expect["block_size"], expect["drafts"])
    assert config.mask_token_id == expect["mask_token_id"]
    assert [list(config.sight(layer)) for layer in range(config.num_hidden_layers)] == expect["sight"]
    weights = random_weights(DFlashModel(config, content["own"]))
    drafter = AutoDrafter.from_pretrained(write(tmp_path, values, named(expect["format"], weights)), dtype="float32")
    assert isinstance(drafter, DFlashDrafter)
    read = drafter.model.state_dict()
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    drafts = propose(drafter, fitting_target(make_target, config))
    assert drafts.token.shape == (1, expect["drafts"])
    assert 0 <= int(drafts.token.min()) <= int(drafts.token.max()) < (config.vocab_size or 202048)
    assert ((drafts.confidence > 0) & (drafts.confidence <= 1)).all()
    # What was read is saved in z-lab's format, and drafts the same from there.
    drafter.save_pretrained(tmp_path / "saved")
    again = AutoDrafter.from_pretrained(tmp_path / "saved")
    assert isinstance(again, DFlashDrafter)
    assert replace(again.config, layer_types=None) == replace(config, layer_types=None, dtype="float32")
    assert torch.equal(propose(again, fitting_target(make_target, config)).confidence, drafts.confidence)


def fitting_target(make_target: Any, config: DFlashConfig) -> PreTrainedModel:
    return make_target(
        "llama",
        dtype=torch.float32,
        vocab_size=config.vocab_size or 202048,
        hidden_size=config.hidden_size,
        intermediate_size=8,
        num_hidden_layers=config.num_target_layers or max(config.target_layer_ids) + 2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
    )


ODD = (None, -1, 0, 3, 1.5, float("nan"), "x", "", [], [1], ["x"], {}, {"a": 1}, {"rope_type": 3}, True)


def places(values: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields every object inside a config, with each of its keys."""
    for key, value in values.items():
        yield values, key
        if isinstance(value, dict):
            yield from places(value)


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_a_broken_config_is_a_value_error_or_works(path: Path) -> None:
    values = fixture(path)["config"]
    for place, key in list(places(values)):
        whole = place[key]
        for odd in ODD:
            place[key] = odd
            with suppress(ValueError):
                config = DFlashConfig.from_dict(values)
                # What is accepted can be built.
                Rope(config, torch.float32, "cpu")
                with torch.device("meta"):
                    DFlashModel(replace(config, num_hidden_layers=1, layer_types=None))
        place[key] = whole


def test_one_rope_per_config_is_what_the_config_says() -> None:
    ropes = {path.stem: DFlashConfig.from_dict(fixture(path)["config"]) for path in FIXTURES}
    assert ropes["qwen3_8b"].rope_theta == 1e6
    assert ropes["qwen3_8_27b_dflash2"].rope_theta == 1e7
    kimi, gpt, llama, mimo = (ropes[name] for name in ("kimi_k2_5", "gpt_oss_20b", "llama3_1_8b", "mimo_v2_5_pro"))
    assert kimi.rope_scaling == {
        "rope_type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    assert gpt.rope_scaling is not None
    assert (gpt.rope_scaling["factor"], gpt.rope_scaling["truncate"], gpt.attention_bias) == (32.0, False, True)
    assert llama.rope_scaling is not None
    assert llama.rope_scaling["rope_type"] == "llama3"
    assert (mimo.rotary_dim, mimo.head_dim, mimo.attention_value_scale) == (4, 8, 0.612)
    assert mimo.attention_sink_bias


def test_what_dflash2_adds_is_read() -> None:
    muse = DFlashConfig.from_dict(fixture(FIXTURES[0].parent / "muse_glimmer_30b_dflash2.json")["config"])
    assert (muse.output_multiplier, muse.final_logit_softcapping) == (0.19611613513818404, 20.0)
    assert (muse.conv_kernel_size, muse.conv_group_size, muse.selector_rank, muse.selector_top_k) == (2, 4, 6, 16)
    assert muse.input_embedding_scale == 1.0, "its code reads the table itself"


# One set of weights under every name.

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}
FLAT = {
    **SHAPE,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": 101,
    "num_target_layers": 3,
    "rope_theta": 1e4,
    "block_size": 5,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]},
}
ROPE = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
NESTED = {
    **{key: value for key, value in FLAT.items() if key not in ("block_size", "rope_theta")},
    **ROPE,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2], "block_size": 5},
}
TOP = {
    **{key: value for key, value in FLAT.items() if key != "dflash_config"},
    "mask_token_id": 3,
    "target_layer_ids": [0, 2],
}
SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "aux_hidden_state_layer_ids": [1, 3],
    "mask_token_id": 3,
    "block_size": 5,
    "draft_vocab_size": 101,
    "sliding_window_non_causal": False,
    "transformer_layer_config": {
        **SHAPE,
        **ROPE,
        "model_type": "qwen3",
        "vocab_size": 101,
        "layer_types": ["full_attention"] * 2,
        "sliding_window": None,
    },
}
ANGELSPEC = {
    **SHAPE,
    "architectures": ["DFlashDraftModel"],
    "model_type": "dflash",
    "vocab_size": 101,
    "rope_theta": 1e4,
    "num_target_layers": 2,
    "target_num_hidden_layers": 3,
    "target_hidden_size": 64,
    "target_layer_ids": [0, 2],
    "mask_token_id": 3,
    "block_size": 5,
}
MUSE = {
    **SHAPE,
    **ROPE,
    "architectures": ["MuseGlimmerAssistantModel"],
    "model_type": "muse_glimmer_assistant",
    "layer_types": ["full_attention"] * 2,
    "sliding_window": 4,
    "block_size": 5,
    "mask_token_id": 3,
    "target_layer_ids": [0, 2],
}
DEEPSPEC = {**TOP, "architectures": ["Qwen3DSparkModel"], "markov_rank": 0, "enable_confidence_head": False}


@pytest.fixture
def target(make_target: Any) -> PreTrainedModel:
    return make_target("llama")


@pytest.fixture
def weights() -> dict[str, Tensor]:
    drawn = random_weights(DFlashModel(DFlashConfig.from_dict(FLAT)))
    return {name: tensor.double() for name, tensor in drawn.items()}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., DFlashDrafter]:
    """`read(config, weights)`: the drafter in a folder that holds them."""

    def build(config: dict[str, Any], weights: dict[str, Tensor]) -> DFlashDrafter:
        drafter = AutoDrafter.from_pretrained(write(tmp_path / "drafter", config, weights), dtype="float64")
        assert isinstance(drafter, DFlashDrafter)
        return drafter

    return build


def tables(target: PreTrainedModel, *names: str) -> dict[str, Tensor]:
    """Returns copies of the target's tables, as some formats ship them."""
    found = {
        "embed_tokens.weight": target.get_input_embeddings().weight,
        "lm_head.weight": target.lm_head.weight,
        "verifier_norm.weight": target.model.norm.weight,
        "verifier_lm_head.weight": target.lm_head.weight,
    }
    return {name: found[name].detach().clone() for name in names}


@pytest.mark.parametrize(
    ("config", "own"),
    [
        (NESTED, ()),
        (TOP, ()),
        ({**FLAT, "architectures": None}, ()),
        ({**FLAT, "layer_types": ["full_attention"] * 2, "sliding_window": 2, "use_sliding_window": False}, ()),
        (FLAT, ("embed_tokens.weight",)),
        (SPECULATORS, ()),
        (SPECULATORS, ("embed_tokens.weight", "lm_head.weight", "verifier_norm.weight", "verifier_lm_head.weight")),
        ({**SPECULATORS, "draft_vocab_size": None}, ()),
        (ANGELSPEC, ("embed_tokens.weight",)),
        (MUSE, ()),
    ],
    ids=[
        "nested",
        "all at the top",
        "no architecture",
        "an unused window",
        "own embeddings",
        "speculators",
        "speculators with all tables",
        "speculators without a draft vocabulary",
        "AngelSpec",
        "Muse",
    ],
)
def test_the_same_weights_draft_the_same_in_every_format(
    target: PreTrainedModel, weights: dict[str, Tensor], read: Any, config: dict[str, Any], own: tuple[str, ...]
) -> None:
    wanted = propose(read(FLAT, weights), target)
    drafter = read(config, {**named(find(config).name, weights), **tables(target, *own)})
    assert drafter.taps == (0, 2)
    drafts = propose(drafter, target)
    assert torch.equal(drafts.token, wanted.token)
    assert torch.equal(drafts.confidence, wanted.confidence)


def test_deepspec_drafts_from_the_anchors_row_on(
    target: PreTrainedModel, weights: dict[str, Tensor], read: Any
) -> None:
    both = tables(target, "embed_tokens.weight", "lm_head.weight")
    drafts = propose(read(DEEPSPEC, {**weights, **both}), target)
    plain = propose(read(FLAT, weights), target)
    assert drafts.token.shape == (1, 5)
    assert torch.equal(drafts.confidence[:, 1:], plain.confidence), "the rows are the same, each of the token before"
    as_z_lab = {**FLAT, "dflash_config": {**FLAT["dflash_config"], "sample_from_anchor": True}}  # type: ignore[dict-item]
    assert torch.equal(propose(read(as_z_lab, weights), target).confidence, drafts.confidence)


def test_speculators_maps_of_a_draft_vocabulary_are_used(
    target: PreTrainedModel, weights: dict[str, Tensor], read: Any
) -> None:
    ids = torch.arange(1, 101, 3)
    t2d = torch.zeros(101, dtype=torch.bool).index_fill(0, ids, True)
    maps = {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}
    head = {"lm_head.weight": target.lm_head.weight.detach()[ids].clone()}
    theirs = propose(read({**SPECULATORS, "draft_vocab_size": len(ids)}, {**weights, **maps, **head}), target)
    ours = propose(read({**FLAT, "draft_vocab_size": len(ids)}, {**weights, **maps}), target)
    assert torch.equal(theirs.token, ours.token)
    torch.testing.assert_close(theirs.confidence, ours.confidence)
    whole = {"d2t": torch.zeros(101, dtype=torch.int64), "t2d": torch.ones(101, dtype=torch.bool)}
    assert torch.equal(
        propose(read(SPECULATORS, {**weights, **whole}), target).token, propose(read(FLAT, weights), target).token
    )


@pytest.mark.parametrize(("said", "causal"), [(False, True), (True, False), (None, False)])
def test_speculators_says_whether_sliding_layers_are_causal(said: bool | None, causal: bool) -> None:
    layers = SPECULATORS["transformer_layer_config"] | {  # type: ignore[operator]
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 7,
    }
    config = DFlashConfig.from_dict(
        {**SPECULATORS, "transformer_layer_config": layers, "sliding_window_non_causal": said}
    )
    assert [config.sight(0), config.sight(1)] == [(7, causal), (None, False)]


CAUSALITY = [
    ({}, [(4, True), (None, False)]),
    ({"is_causal": False}, [(4, False), (None, False)]),
    ({"is_causal": True}, [(4, True), (None, True)]),
    ({"dflash_config": {"causal": False}}, [(4, False), (None, False)]),
    ({"dflash_config": {"causal": False}, "is_causal": True}, [(4, True), (None, True)]),
    ({"dflash_config": {"use_swa": True, "swa_window_size": 6}}, [(6, True), (None, False)]),
    ({"layer_types": None, "dflash_config": {"use_swa": True, "swa_window_size": 6}}, [(6, False), (6, False)]),
    ({"layer_types": ["full_attention"] * 2, "dflash_config": {"use_swa": True}}, [(4, False), (4, False)]),
    ({"layer_types": None, "dflash_config": {"use_swa": True, "causal": True}}, [(4, True), (4, True)]),
    ({"layer_types": None, "use_sliding_window": False}, [(None, False), (None, False)]),
]


@pytest.mark.parametrize(("changes", "sight"), CAUSALITY, ids=str)
def test_windows_and_causality_follow_their_rules(changes: dict[str, Any], sight: list[Any]) -> None:
    values = {**FLAT, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, **changes}
    values["dflash_config"] = FLAT["dflash_config"] | changes.get("dflash_config", {})  # type: ignore[operator]
    config = DFlashConfig.from_dict(values)
    assert [config.sight(0), config.sight(1)] == sight
    assert DFlashConfig.from_dict(config.to_dict()) == replace(
        config, layer_types=tuple(config.to_dict()["layer_types"])
    )


# Transformers' own drafter is the reference for its format.


@pytest.mark.parametrize("window", [2, 3, 50])
@pytest.mark.parametrize("context", [1, 7])
@torch.no_grad()
def test_the_muse_assistant_drafts_as_in_transformers(
    target: PreTrainedModel, tmp_path: Path, window: int, context: int
) -> None:
    values = {**MUSE, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": window}
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**values)).double().eval()
    for name, weight in model.named_parameters():
        weight.normal_(float("norm" in name), 0.3, generator=torch.Generator().manual_seed(len(name)))
    model.save_pretrained(tmp_path)
    drafter = AutoDrafter.from_pretrained(tmp_path)
    assert isinstance(drafter, DFlashDrafter)
    drafts = propose(drafter, target, context)
    taps = torch.randn(1, context, 128, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    block = target.get_input_embeddings()(torch.tensor([[9, 3, 3, 3, 3]]))
    positions = torch.arange(context + 5)[None]
    # Transformers finds the rows' place by the cache; without one it takes the first row for position 0.
    cache = _cache(model, context)
    hidden = model(block, taps, position_ids=positions, cache=cache).last_hidden_state
    logits = target.lm_head(hidden[:, 1:]).float()
    assert torch.equal(drafts.token, logits.argmax(-1))
    torch.testing.assert_close(drafts.confidence, logits.softmax(-1).amax(-1), rtol=1e-6, atol=0)
    loaded = propose(DFlashDrafter.from_module(model), target, context)
    assert torch.equal(loaded.confidence, drafts.confidence)


def _cache(model: nn.Module, context: int) -> Any:
    from transformers.cache_utils import DFlashCache

    cache = DFlashCache(config=model.config)
    cache.activate_past_recording()
    cache.set_previous_accepted_tokens(context)
    return cache


# Models that are loaded already.


class Remote(nn.Module):
    """A drafter as remote code brings it: weights under z-lab's names, and a Transformers config."""

    def __init__(self, weights: dict[str, Tensor], **config: Any):
        super().__init__()
        self.config = Qwen3Config(**config)
        for name, tensor in weights.items():
            path, _, last = name.rpartition(".")
            module = self
            for part in path.split("."):
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, nn.Parameter(tensor))


class DFlashDraftModel(Remote):
    """Bears the name that its config would have, had it been read from a folder."""


@pytest.mark.parametrize("architectures", [["DFlashDraftModel"], None])
def test_a_module_of_remote_code_is_a_drafter(
    target: PreTrainedModel, weights: dict[str, Tensor], read: Any, architectures: Any
) -> None:
    config = {key: value for key, value in FLAT.items() if key != "rope_theta"} | ROPE
    module = DFlashDraftModel(weights, **config | {"architectures": architectures})
    drafter = AutoDrafter.from_module(module)
    assert isinstance(drafter, DFlashDrafter)
    assert drafter.dtype == torch.float64
    assert drafter.model.fc.weight.data_ptr() == module.fc.weight.data_ptr(), "weights are shared"
    assert module.fc.weight.requires_grad, "and left as they were"
    wanted = propose(read(FLAT, weights), target)
    assert torch.equal(propose(drafter, target).confidence, wanted.confidence)


def test_generate_takes_such_a_module(target: PreTrainedModel, weights: dict[str, Tensor], make_prompts: Any) -> None:
    module = DFlashDraftModel(weights, **{key: value for key, value in FLAT.items() if key != "rope_theta"} | ROPE)
    prompts = make_prompts(3)
    options = {"max_new_tokens": 8, "do_sample": False}
    wanted = target.generate(**prompts, **options)
    got = target.generate(**prompts, **options, assistant_model=module, dcut=0.5)
    assert torch.equal(got, wanted)


def test_other_modules_are_no_drafters(target: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    with pytest.raises(TypeError, match=r"LlamaForCausalLM is no drafter.*'llama'.*A smaller causal language model"):
        AutoDrafter.from_module(target)
    with pytest.raises(TypeError, match="Linear is no drafter"):
        AutoDrafter.from_module(nn.Linear(1, 1))
    module = DFlashDraftModel({"fc.weight": weights["fc.weight"]}, **FLAT)
    with pytest.raises(ValueError, match=r"the weights of DFlashDraftModel do not fit.*missing: hidden_norm\.weight"):
        AutoDrafter.from_module(module)


# Drafters of every kind, from generate's door to its end.

KINDS: dict[str, dict[str, Any]] = {
    "shifted labels": {"sample_from_anchor": True},
    "sliding windows": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 3},
    "sinks": {"attention_sink_bias": True},
    "DFlash2": {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 6, "selector_top_k": 4},
}


@pytest.mark.parametrize("features", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("budget", [0.4, 1.0])
def test_output_is_the_targets_whatever_drafts(
    target: PreTrainedModel, make_drafter: Any, make_prompts: Any, features: dict[str, Any], budget: float
) -> None:
    prompts, options = make_prompts(4), {"max_new_tokens": 12, "do_sample": False}
    wanted = target.generate(**prompts, **options)
    drafter = make_drafter(target, features=features)
    got = target.generate(**prompts, **options, assistant_model=drafter, dcut=budget, return_dict_in_generate=True)
    assert torch.equal(got.sequences, wanted)
    assert got.stats.drafted_steps > 0


def test_drafts_of_a_selector_cannot_be_sampled(target: PreTrainedModel, make_drafter: Any, make_prompts: Any) -> None:
    drafter = make_drafter(target, features=KINDS["DFlash2"])
    assert not drafter.independent
    with pytest.raises(ValueError, match=r"proposals='sampled'.*leave proposals at 'greedy'"):
        target.generate(
            **make_prompts(1),
            max_new_tokens=4,
            do_sample=True,
            assistant_model=drafter,
            dcut={"proposals": "sampled", "budget": 1.0},
        )
