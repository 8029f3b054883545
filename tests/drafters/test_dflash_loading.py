"""Reading and writing DFlash drafters: what is accepted, what is refused, and that each error says what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from hf_dcut.drafters import DRAFTERS, AutoDrafter, checkpoint
from hf_dcut.drafters.dflash import DFlashConfig, DFlashDrafter, DFlashModel

# As z-lab publishes it for Qwen3-8B; keys that mean nothing here are part of it.
QWEN3 = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "num_target_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
TAPS = {"mask_token_id": 1, "target_layer_ids": [0, 2]}
DFLASH2 = {"block_size": 8, "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
SPECULATORS = {
    "speculators_model_type": "dflash",
    "aux_hidden_state_layer_ids": [2, 10, 18],
    "mask_token_id": 1,
    "transformer_layer_config": QWEN3,
}
SLIDING = ["sliding_attention"] * 4 + ["full_attention"]


def changed(*drop: str, **values: Any) -> dict[str, Any]:
    return {k: v for k, v in (QWEN3 | values).items() if k not in drop}


# Configs that are read.


def test_a_published_config_is_read() -> None:
    config = DFlashConfig.from_dict(QWEN3)
    assert config == DFlashConfig(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        block_size=16,
        mask_token_id=151669,
        target_layer_ids=(1, 9, 17, 25, 33),
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        num_target_layers=36,
        max_position_embeddings=40960,
        layer_types=("full_attention",) * 5,
        dtype="bfloat16",
    )
    assert DFlashConfig.from_dict(config.to_dict()) == config
    assert DFlashConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_values_inside_dflash_config_win() -> None:
    nested = {**QWEN3["dflash_config"], "block_size": 8}  # type: ignore[dict-item]
    assert DFlashConfig.from_dict(changed(dflash_config=nested)).block_size == 8
    flat = changed("dflash_config", mask_token_id=5, target_layer_ids=[0])
    assert DFlashConfig.from_dict(flat).target_layer_ids == (0,)


def test_flat_rope_theta_wins_over_the_nested_one() -> None:
    nested = {"rope_theta": 5e5, "rope_type": "default"}
    assert DFlashConfig.from_dict(changed(rope_parameters=nested)).rope_theta == 1e6
    assert DFlashConfig.from_dict(changed("rope_theta", rope_parameters=nested)).rope_theta == 5e5
    assert DFlashConfig.from_dict(changed(rope_scaling={"type": "default"})).rope_theta == 1e6


def test_left_out_keys_follow_from_others() -> None:
    keys = ("head_dim", "num_key_value_heads", "num_target_layers", "layer_types", "torch_dtype", "architectures")
    config = DFlashConfig.from_dict(changed(*keys))
    assert (config.head_dim, config.num_key_value_heads, config.num_target_layers) == (128, 32, None)
    assert (config.layer_types, config.dtype) == (None, None)


# Configs that are refused.


@pytest.mark.parametrize(
    ("values", "says"),
    [
        # Formats.
        ({**QWEN3, "architectures": ["Qwen3DFlyModel"]}, ["DFly", "Qwen3DFlyModel", "corrects hidden states"]),
        ({**QWEN3, "architectures": ["DFlareDraftModel"]}, ["DFlare", "DFlareDraftModel", "not supported"]),
        ({**QWEN3, "architectures": ["DominoDraftModel"]}, ["Domino", "recurrent network"]),
        ({**QWEN3, "architectures": ["Gemma4DSparkModel"]}, ["DSpark", "Gemma4DSparkModel", "only Qwen3DSparkModel"]),
        ({**SPECULATORS, "speculators_model_type": "eagle3"}, ["speculators_model_type='eagle3'", "only"]),
        ({**QWEN3, "architectures": ["LlamaForCausalLM"]}, ["no DFlash drafter", "LlamaForCausalLM", "z-lab DFlash2"]),
        ({"hidden_size": 4}, ["no architectures, no model_type", "Supported: speculators"]),
        # Maths that other drafters of these formats have.
        ({**QWEN3, "architectures": ["Qwen3DSparkModel"], "markov_rank": 256}, ["Markov head", "markov_rank=256"]),
        (changed(enable_confidence_head=True), ["confidence head", "enable_confidence_head=True"]),
        (changed(quantization_config={"quant_method": "fp8"}), ["quantised weights", "fp8"]),
        (changed(is_neox_style=False), ["interleaved rotary", "is_neox_style=False"]),
        (
            changed(dflash_config={**TAPS, "use_aux_hidden_state": False}),
            ["without taps", "use_aux_hidden_state=False"],
        ),
        (changed(logit_scale=0.5), ["scaled logits", "logit_scale=0.5"]),
        (changed(shift_label=True), ["shifted labels", "shift_label=True"]),
        (changed(v_head_dim=64), ["v_head_dim=64", "head_dim=128"]),
        (changed(target_hidden_size=2048), ["target_hidden_size=2048", "hidden_size=4096"]),
        ({**SPECULATORS, "projector_type": "domino"}, ["another projector", "domino"]),
        (
            changed(
                "dflash_config", target_num_hidden_layers=36, target_layer_ids=[1], mask_token_id=3, model_arch="dflare"
            ),
            ["another model", "dflare"],
        ),
        # RoPE.
        (changed(rope_scaling={"type": "dynamic", "factor": 2.0}), ["the RoPE type dynamic", "linear, llama3, yarn"]),
        (changed(rope_scaling={**YARN, "factor": None}), ["factor=None"]),
        (changed(rope_scaling={"rope_type": "yarn", "factor": 2.0}), ["original_max_position_embeddings=None"]),
        (changed(rope_scaling={**YARN, "rope_type": "llama3"}), ["low_freq_factor=None"]),
        (changed(rope_scaling=[1]), ["rope_scaling=[1]", "an object"]),
        (changed(rope_parameters={"full_attention": {"rope_theta": 1e6}}), ["RoPE for each layer type"]),
        (changed(partial_rotary_factor=0.01), ["partial_rotary_factor=0.01", "up to head_dim, not 1"]),
        (changed(partial_rotary_factor=1.5), ["partial_rotary_factor=1.5", "not 192"]),
        (changed(rope_theta=-1), ["rope_theta=-1", "positive number"]),
        # Windows.
        (changed(layer_types=SLIDING), ["use_sliding_window=False contradict"]),
        (changed("use_sliding_window", layer_types=SLIDING), ["sliding_window=None", "the width of the window"]),
        (changed("layer_types", "use_sliding_window", sliding_window=4096), ["sliding_window=4096", "no layer_types"]),
        (changed("layer_types", dflash_config={**TAPS, "use_swa": True}), ["sliding_window=None"]),
        (changed(layer_types=["chunked_attention"] * 5), ["the layer type chunked_attention"]),
        (changed(is_causal="no"), ["is_causal='no'", "true or false"]),
        # DFlash2.
        (changed(architectures=["DFlash2DraftModel"]), ["conv_kernel_size=None"]),
        (
            changed(dflash_config={**TAPS, "conv_kernel_size": 2}),
            ["conv_kernel_size=2", "conv_group_size=None", "both"],
        ),
        (changed(dflash_config={**TAPS, **DFLASH2, "conv_group_size": 3}), ["not a multiple of conv_group_size=3"]),
        (changed(dflash_config={**TAPS, **DFLASH2}, draft_vocab_size=64), ["selector_rank=256", "draft_vocab_size=64"]),
        (changed(dflash_config={**TAPS, "final_logit_softcapping": -3.0}), ["final_logit_softcapping=-3.0"]),
        (changed(dflash_config={**TAPS, "output_multiplier": "1"}), ["output_multiplier='1'"]),
        # speculators.
        (
            {**SPECULATORS, "aux_hidden_state_layer_ids": [0, 2]},
            ["aux_hidden_state_layer_ids=[0, 2]", "cannot be tapped"],
        ),
        ({**SPECULATORS, "aux_hidden_state_layer_ids": None}, ["aux_hidden_state_layer_ids=None"]),
        ({**SPECULATORS, "transformer_layer_config": None}, ["hidden_size=None"]),
        ({**SPECULATORS, "transformer_layer_config": "qwen3"}, ["transformer_layer_config='qwen3'", "an object"]),
        # Values that are missing or make no sense.
        (changed(dflash_config={"mask_token_id": 1}), ["target_layer_ids=None", "trained on", "dflash_config"]),
        (changed(dflash_config={"mask_token_id": 1, "target_layer_ids": []}), ["target_layer_ids=[]"]),
        (changed(dflash_config={"mask_token_id": 1, "target_layer_ids": [-1, 2]}), ["target_layer_ids=[-1, 2]"]),
        (changed(dflash_config={"target_layer_ids": [1]}), ["mask_token_id=None"]),
        (changed("block_size"), ["block_size=None"]),
        (changed(block_size=1), ["block_size=1", "2 or more"]),
        (changed("rope_theta"), ["rope_theta=None"]),
        (changed("rms_norm_eps"), ["rms_norm_eps=None"]),
        (changed("vocab_size"), ["vocab_size=None"]),
        (changed(hidden_size="big"), ["hidden_size='big'", "positive integer"]),
        (changed(num_key_value_heads=5), ["num_attention_heads=32", "num_key_value_heads=5"]),
        (changed(head_dim=63), ["head_dim=63", "even"]),
        (changed(layer_types=["full_attention"]), ["layer_types has 1", "num_hidden_layers=5"]),
        (changed(torch_dtype="int8"), ["dtype='int8'", "bfloat16"]),
    ],
)
def test_a_config_that_cannot_be_run_is_refused_by_name(values: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(ValueError, match=r"=|upported|entries") as error:
        DFlashConfig.from_dict(values)
    for words in says:
        assert words in str(error.value)


# Folders.


@pytest.fixture
def drafter(make_target: Any, make_drafter: Any) -> DFlashDrafter:
    return make_drafter(make_target("llama"), dtype=torch.float32, draft_ids=range(1, 101, 2))


@pytest.fixture
def folder(drafter: DFlashDrafter, tmp_path: Path) -> Path:
    drafter.save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_tensors(folder: Path, drop: str | None = None, **tensors: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    old = {name: tensor for name, tensor in load_file(path).items() if name != drop}
    save_file(old | {name.replace("__", "."): tensor for name, tensor in tensors.items()}, path)


def shard(folder: Path) -> None:
    """Splits a folder's weights over two files and an index, as large models are saved."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def same_weights(a: DFlashDrafter, b: DFlashDrafter) -> bool:
    first, second = a.model.state_dict(), b.model.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("draft_ids", [None, range(0, 101, 5)])
def test_what_is_saved_is_read_again(
    make_target: Any, make_drafter: Any, tmp_path: Path, bias: bool, draft_ids: Any
) -> None:
    drafter = make_drafter(make_target("qwen3"), attention_bias=bias, draft_ids=draft_ids, dtype=torch.bfloat16)
    drafter.save_pretrained(tmp_path)
    again = AutoDrafter.from_pretrained(tmp_path)
    assert isinstance(again, DFlashDrafter)
    assert same_weights(again, drafter)
    assert (again.taps, again.draft_tokens, again.dtype) == (drafter.taps, drafter.draft_tokens, torch.bfloat16)
    assert again.fingerprint() == drafter.fingerprint()
    assert not again.model.training
    assert not any(weight.is_meta or weight.requires_grad for weight in again.model.parameters())
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "config.json").read_text()


def test_saved_names_are_z_labs(folder: Path) -> None:
    names = set(load_file(folder / "model.safetensors"))
    layer = [f"self_attn.{p}_proj" for p in "qkvo"] + ["self_attn.q_norm", "self_attn.k_norm"]
    layer += [f"mlp.{p}_proj" for p in ("gate", "up", "down")] + ["input_layernorm", "post_attention_layernorm"]
    wanted = {f"layers.{i}.{name}.weight" for i in range(2) for name in layer}
    assert names == wanted | {"fc.weight", "hidden_norm.weight", "norm.weight", "d2t", "t2d"}


def test_shards_are_read_as_one(folder: Path, drafter: DFlashDrafter) -> None:
    shard(folder)
    assert same_weights(AutoDrafter.from_pretrained(folder), drafter)  # type: ignore[arg-type]


def test_a_subfolder_is_read(folder: Path, drafter: DFlashDrafter) -> None:
    assert same_weights(DFlashDrafter.from_pretrained(folder.parent, subfolder="drafter"), drafter)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float64])
def test_dtype_is_of_the_users_choosing(folder: Path, dtype: Any) -> None:
    drafter = AutoDrafter.from_pretrained(str(folder), dtype=dtype, device="cpu")
    assert isinstance(drafter, DFlashDrafter)
    assert {w.dtype for w in drafter.model.parameters()} == {checkpoint.parse_dtype(dtype)}
    assert drafter.model.d2t is not None
    assert drafter.model.d2t.dtype == torch.int64


def test_dtype_is_the_files_when_the_config_has_none(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    del values["dtype"]
    (folder / "config.json").write_text(json.dumps(values))
    edit_tensors(folder, **{"fc__weight": load_file(folder / "model.safetensors")["fc.weight"].double()})
    assert DFlashModel.load(folder).fc.weight.dtype == torch.float64


def test_one_device_is_taken_from_either_name(folder: Path) -> None:
    for device_map in ("cpu", {"": "cpu"}, torch.device("cpu")):
        assert DFlashDrafter.from_pretrained(folder, device_map=device_map).device.type == "cpu"
    expected = torch.accelerator.current_accelerator() or torch.device("cpu")
    assert DFlashDrafter.from_pretrained(folder, device_map="auto").device.type == expected.type
    with pytest.raises(ValueError, match="one of them"):
        DFlashDrafter.from_pretrained(folder, device="cpu", device_map="cpu")
    with pytest.raises(ValueError, match="one device"):
        DFlashDrafter.from_pretrained(folder, device_map={"layers": 0, "fc": 1})


def test_unknown_options_are_not_dropped(folder: Path) -> None:
    with pytest.raises(TypeError, match="torch_dtype"):
        AutoDrafter.from_pretrained(folder, torch_dtype="auto")
    with pytest.raises(ValueError, match=r"dtype='int4'.*bfloat16"):
        AutoDrafter.from_pretrained(folder, dtype="int4")
    with pytest.raises(ValueError, match=r"revision='main'.*folder"):
        AutoDrafter.from_pretrained(folder, revision="main")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"drop": "norm.weight"}, "missing: norm.weight"),
        ({"drop": "d2t"}, "missing: d2t"),
        ({"surprise__weight": torch.zeros(4, 4)}, "unexpected: surprise.weight"),
        ({"embed_tokens__weight": torch.zeros(4, 4)}, r"another shape: embed_tokens.weight is \(4, 4\).*\(101, 64\)"),
        ({"lm_head__weight": torch.zeros(101, 64)}, r"another shape: lm_head.weight is \(101, 64\).*\(50, 64\)"),
        (
            {"fc__weight": torch.zeros(64, 64)},
            r"another shape: fc.weight is \(64, 64\), config.json asks for \(64, 128\)",
        ),
        ({"d2t": torch.zeros(7, dtype=torch.int64)}, "another shape: d2t"),
        ({"d2t": torch.full((50,), 60)}, "tokens 60 to 109, vocab_size=101"),
        ({"d2t": torch.full((50,), -1)}, "tokens -1 to 48"),
        ({"d2t": torch.zeros(50)}, "d2t.*float32.*integers"),
        ({"t2d": torch.ones(101, dtype=torch.bool)}, "t2d and d2t"),
    ],
)
def test_weights_that_do_not_fit_are_named(folder: Path, change: dict[str, Any], says: str) -> None:
    edit_tensors(folder, **change)
    with pytest.raises(ValueError, match=says):
        AutoDrafter.from_pretrained(folder)


def test_many_missing_weights_are_counted(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=4, layer_types=["full_attention"] * 4)
    with pytest.raises(ValueError, match=r"missing: layers\.2\.input_layernorm\.weight, .* and 16 more"):
        AutoDrafter.from_pretrained(folder)


def test_t2d_alone_is_refused_and_d2t_alone_is_enough(folder: Path, drafter: DFlashDrafter) -> None:
    edit_tensors(folder, drop="t2d")
    assert same_weights(DFlashDrafter.from_pretrained(folder), drafter)
    edit_tensors(folder, drop="d2t", t2d=torch.zeros(101, dtype=torch.bool))
    edit_config(folder, draft_vocab_size=None)
    with pytest.raises(ValueError, match="t2d but no draft vocabulary"):
        AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "drafter.pt", "state.ckpt"])
def test_pickled_weights_are_not_opened(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(FileNotFoundError, match=rf"pickled weights only \({name}\).*Convert"):
        AutoDrafter.from_pretrained(folder)


def test_missing_and_broken_files_are_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        AutoDrafter.from_pretrained(tmp_path / "cut")
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="has no weights"):
        AutoDrafter.from_pretrained(tmp_path / "cut")
    (tmp_path / "cut" / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        AutoDrafter.from_pretrained(tmp_path / "cut")
    (tmp_path / "cut" / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list"):
        AutoDrafter.from_pretrained(tmp_path / "cut")
    (tmp_path / "cut" / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        AutoDrafter.from_pretrained(tmp_path / "cut")


def test_an_index_names_its_neighbours_only(folder: Path) -> None:
    shard(folder)
    index = folder / "model.safetensors.index.json"
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00001-of-00002.*missing"):
        AutoDrafter.from_pretrained(folder)
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(ValueError, match="beside their index"):
        AutoDrafter.from_pretrained(folder)
    index.write_text(json.dumps({"weights": []}))
    with pytest.raises(ValueError, match="not an index"):
        AutoDrafter.from_pretrained(folder)


def test_other_models_are_no_drafters(folder: Path, make_target: Any, tmp_path: Path) -> None:
    make_target("llama").save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match=r"architectures=\['LlamaForCausalLM'\].*Known: DFlash"):
        AutoDrafter.from_pretrained(tmp_path / "target")
    edit_config(folder, architectures=["Qwen3DFlyModel"])
    with pytest.raises(ValueError, match="DFly drafter"):
        AutoDrafter.from_pretrained(folder)
    assert DRAFTERS["dflash"] is DFlashDrafter


# The Hub.


def test_a_hub_name_is_downloaded_without_code_or_pickles(
    folder: Path, drafter: DFlashDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def snapshot(name: str, **options: Any) -> str:
        calls.append((name, options))
        return str(folder.parent)

    monkeypatch.setattr(checkpoint, "snapshot_download", snapshot)
    loaded = AutoDrafter.from_pretrained("owner/model", revision="abc", subfolder="drafter")
    assert same_weights(loaded, drafter)  # type: ignore[arg-type]
    patterns = {"allow_patterns": ["drafter/*.json", "drafter/*.safetensors"], "ignore_patterns": ["drafter/*/*"]}
    assert calls == [("owner/model", {"revision": "abc", **patterns})]


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub cache that holds the drafter at the top and in a subfolder of one revision of "owner/drafter"."""
    repository = tmp_path / "hub" / "models--owner--drafter"
    snapshot = repository / "snapshots" / ("a" * 40)
    blobs, refs = repository / "blobs", repository / "refs"
    for place in (snapshot / "small", blobs, refs):
        place.mkdir(parents=True)
    for file in folder.iterdir():
        (blobs / file.name).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(blobs / file.name)
        (snapshot / "small" / file.name).symlink_to(blobs / file.name)
    (refs / "main").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


@pytest.mark.parametrize("options", [{}, {"revision": "main"}, {"revision": "a" * 40}, {"subfolder": "small"}], ids=str)
def test_a_repository_in_the_hubs_cache_is_read(hub: Path, drafter: DFlashDrafter, options: dict[str, str]) -> None:
    assert same_weights(AutoDrafter.from_pretrained("owner/drafter", **options), drafter)  # type: ignore[arg-type]


def test_what_a_repository_lacks_is_named(hub: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json: give the folder \(or subfolder=\)"):
        AutoDrafter.from_pretrained("owner/drafter", subfolder="large")
    with pytest.raises(FileNotFoundError, match=r"owner/drafter.*no Hub repository of that name could be read"):
        AutoDrafter.from_pretrained("owner/drafter", revision="b" * 40)
    (hub / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="has no weights"):
        AutoDrafter.from_pretrained("owner/drafter")


def test_a_mask_of_its_own_must_not_be_a_pickle(folder: Path, drafter: DFlashDrafter) -> None:
    mimo = {"use_swa": True, "swa_window_size": 9, "attention_value_scale": 0.6}
    edit_config(folder, dflash_config={"mask_token_id": 3, "target_layer_ids": [0, 2], **mimo}, layer_types=None)
    with pytest.raises(
        ValueError, match=r"mask_embedding is missing. MiMo drafters keep it in mask_embedding\.pt, a pickle"
    ):
        AutoDrafter.from_pretrained(folder)
    save_file({"mask_embedding": torch.arange(64.0)}, folder / "mask_embedding.safetensors")
    read = AutoDrafter.from_pretrained(folder)
    assert isinstance(read, DFlashDrafter)
    assert read.model.mask_embedding is not None
    assert read.model.mask_embedding.tolist() == list(range(64))


@pytest.mark.parametrize("name", ["no/such-drafter", "/no/such/folder", "./nowhere"])
def test_a_name_that_is_nowhere_says_both_places(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=rf"drafter '{name}': there is no such folder, and no Hub repository"):
        AutoDrafter.from_pretrained(name)


# Fitting a target.


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"hidden_size": 32, "head_dim": 8}, "hidden_size=64, but the target has 32"),
        ({"num_hidden_layers": 4}, "num_target_layers=3, but the target has 4"),
        ({"vocab_size": 120}, "vocab_size=101, but the target has 120"),
    ],
)
def test_a_drafter_for_another_target_is_refused(
    make_target: Any, drafter: DFlashDrafter, overrides: dict[str, Any], says: str
) -> None:
    drafter.check(make_target("llama"))
    with pytest.raises(ValueError, match=f"{says}.*Load the target"):
        drafter.check(make_target("llama", **overrides))


def test_everything_that_does_not_fit_is_named_at_once(make_target: Any, drafter: DFlashDrafter) -> None:
    other = make_target("llama", hidden_size=32, head_dim=8, num_hidden_layers=2, vocab_size=120)
    with pytest.raises(ValueError, match="hidden_size=64") as error:
        drafter.check(other)
    for words in ("num_target_layers=3", "vocab_size=101", "target_layer_ids=[0, 2]", "not [2]"):
        assert words in str(error.value)


def test_drafters_that_know_no_thinking_say_so(
    make_target: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = make_target("qwen3", hidden_size=2560, num_hidden_layers=36, intermediate_size=8, vocab_size=8)
    drafter = DFlashDrafter.random(target.config, taps=[1], mask_token_id=151669, layers=1)
    drafter.save_pretrained(tmp_path / "thoughtless")
    AutoDrafter.from_pretrained(tmp_path / "thoughtless")
    assert "pass enable_thinking=False to apply_chat_template" in caplog.text
    caplog.clear()
    DFlashDrafter.random(make_target("qwen3").config, taps=[1], mask_token_id=3).save_pretrained(tmp_path / "other")
    AutoDrafter.from_pretrained(tmp_path / "other")
    assert not caplog.text
    AutoDrafter.from_pretrained(tmp_path / "other", dtype="float16")
    assert "the drafter runs in float16" in caplog.text


def test_taps_and_mask_must_exist_in_the_target(make_target: Any, make_drafter: Any) -> None:
    target = make_target("llama")
    outside = make_drafter(target, taps=(0, 3))
    with pytest.raises(ValueError, match=r"target_layer_ids=\[0, 3\]: the target has layers 0 to 2, not \[3\]"):
        outside.check(target)
    masked = make_drafter(target, mask_token_id=101)
    with pytest.raises(ValueError, match=r"mask_token_id=101.*rows 0 to 100"):
        masked.check(target)


def test_a_target_without_a_head_or_elsewhere_is_refused(make_target: Any, drafter: DFlashDrafter) -> None:
    target = make_target("llama")
    with pytest.raises(ValueError, match="LlamaModel has no output embeddings"):
        drafter.check(target.model)
    drafter.model.to("meta")
    with pytest.raises(ValueError, match=r"the drafter is on meta, the target on cpu: call drafter\.to\('cpu'\)"):
        drafter.check(target)


@pytest.mark.parametrize(("target_dtype", "drafter_dtype"), [("float16", "float32"), ("float32", "float16")])
def test_float16_is_warned_of(make_target: Any, make_drafter: Any, target_dtype: str, drafter_dtype: str) -> None:
    target = make_target("llama", dtype=getattr(torch, target_dtype))
    drafter = make_drafter(target, dtype=getattr(torch, drafter_dtype))
    who = "target" if target_dtype == "float16" else "drafter"
    with pytest.warns(UserWarning, match=f"the {who} runs in float16.*bfloat16"):
        drafter.check(target)


# Random drafters.


def test_random_drafters_follow_their_seed_alone(make_target: Any) -> None:
    config = make_target("qwen3").config
    state = torch.random.get_rng_state()
    made = [DFlashDrafter.random(config, taps=(0, 2), mask_token_id=3, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert same_weights(made[0], made[1])
    assert not same_weights(made[0], made[2])
    assert (made[0].draft_tokens, len(made[0].model.layers), made[0].dtype) == (15, 5, torch.float32)
    assert made[0].config.num_target_layers == 3
    assert not any(weight.is_meta for weight in made[0].model.parameters())


def test_random_drafters_draft_from_the_tokens_given(make_target: Any) -> None:
    config = make_target("qwen3").config
    drafter = DFlashDrafter.random(config, taps=(0,), mask_token_id=3, draft_ids=[2, 5, 50], dtype=torch.bfloat16)
    ids = drafter.model.draft_ids()
    assert ids is not None
    assert ids.tolist() == [2, 5, 50]
    assert drafter.cell_bytes(make_target("qwen3")) == 5 * 2 * 2 * 16 * 2
