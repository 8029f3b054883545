"""`hf-dcut inspect`: what it tells of a drafter, and which problems it finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_dcut.cli import main
from hf_dcut.drafters import AutoDrafter
from hf_dcut.drafters.dflash import DFlashConfig
from hf_dcut.drafters.inspection import inspect

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def folder(make_target: Any, make_drafter: Any, tmp_path: Path) -> Path:
    make_drafter(make_target("llama"), dtype=torch.bfloat16, draft_ids=range(0, 100, 2)).save_pretrained(tmp_path / "d")
    return tmp_path / "d"


@pytest.fixture
def target(make_target: Any, tmp_path: Path) -> Path:
    make_target("llama").save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def edit(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_good_drafter_has_no_problems(folder: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder), "--target", str(target)]) == 0
    printed = capsys.readouterr().out
    weights = AutoDrafter.from_pretrained(folder).model.parameters()  # type: ignore[attr-defined]
    count = sum(weight.numel() for weight in weights) / 1e6
    for words in (
        "format      z-lab DFlash",
        "3 layers, hidden size 64, vocabulary of 101",
        "taps        0, 2",
        "5 rows, 4 drafts from 50 tokens",
        "mask        token 3",
        "window      2 x all",
        f"{count:.1f} M, saved in bfloat16, embeddings and head of the target",
        "no problems found",
    ):
        assert words in printed


def test_a_subfolder_is_looked_at(folder: Path) -> None:
    assert not inspect(folder.parent, subfolder="d").problems


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.json")), ids=lambda path: path.stem)
def test_every_family_is_told_of_without_its_weights(tmp_path: Path, path: Path) -> None:
    content = json.loads(path.read_text())
    (tmp_path / "config.json").write_text(json.dumps(content["config"]))
    found = inspect(tmp_path)
    config = DFlashConfig.from_dict(content["config"])
    assert found.facts["format"] == content["expect"]["format"]
    assert found.facts["mask"] == f"token {config.mask_token_id}"
    assert len(found.problems) == 1
    assert "has no weights" in found.problems[0]


@pytest.mark.parametrize(
    ("family", "what", "how"),
    [
        ("qwen3_6_27b_mixed", "window", "4 x 2048 causal, 1 x all"),
        ("qwen3_8_27b_dflash2", "window", "5 x 2048"),
        ("qwen3_8_27b_dflash2", "extras", "convolutions of 2 rows, selector among 16"),
        ("kimi_k2_5", "rope", "yarn"),
        ("mimo_v2_5_pro", "rope", "base 10000, default, 4 of 8 dimensions"),
        ("mimo_v2_5_pro", "extras", "attention sinks, values times 0.612"),
        ("deepspec_qwen3_4b", "extras", "rows predict the token after their own"),
        ("speculators_qwen3_8b", "target", "Qwen/Qwen3-8B: layers not told"),
        ("muse_glimmer_30b_assistant", "target", "name not told: layers not told, hidden size 16, vocabulary not told"),
    ],
)
def test_what_is_particular_is_told(tmp_path: Path, family: str, what: str, how: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(json.loads((FIXTURES / f"{family}.json").read_text())["config"]))
    assert how in inspect(tmp_path).facts[what]


def test_problems_of_a_pair_are_all_named(
    folder: Path, make_target: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_target("llama", hidden_size=32, head_dim=8, num_hidden_layers=2).save_pretrained(tmp_path / "other")
    assert main(["inspect", str(folder), "--target", str(tmp_path / "other")]) == 1
    printed = capsys.readouterr().out
    assert printed.count("PROBLEM") == 3
    for words in ("hidden_size=64, but the target has 32", "num_target_layers=3", "not [2]"):
        assert words in printed


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"architectures": ["Qwen3DFlyModel"]}, "a DFly drafter"),
        ({"architectures": ["LlamaForCausalLM"]}, "no DFlash drafter that is known"),
        ({"rope_theta": None}, "rope_theta=None"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "missing: layers.2.input_layernorm.weight"),
        ({"intermediate_size": 64}, "another shape: layers.0.mlp.gate_proj.weight is (128, 64)"),
    ],
)
def test_what_is_wrong_with_a_drafter_is_named(
    folder: Path, values: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(folder, **values)
    assert main(["inspect", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert says in printed
    assert "no problems" not in printed


def test_broken_and_pickled_weights_are_problems(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    assert "not a whole safetensors file" in inspect(folder).problems[0]
    weights.rename(folder / "pytorch_model.bin")
    assert "pickled weights only" in inspect(folder).problems[0]


def test_an_own_table_without_a_vocabulary_is_a_problem(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name not in ("d2t", "t2d")}
    save_file(tensors | {"embed_tokens.weight": torch.zeros(101, 64)}, path)
    edit(folder, vocab_size=None, draft_vocab_size=None)
    assert "vocab_size=None: a drafter with a vocabulary of its own" in inspect(folder).problems[0]


def test_maps_of_a_whole_vocabulary_are_no_problem(make_target: Any, make_drafter: Any, tmp_path: Path) -> None:
    make_drafter(make_target("llama")).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    maps = {"d2t": torch.zeros(101, dtype=torch.int64), "t2d": torch.ones(101, dtype=torch.bool)}
    save_file(load_file(path) | maps, path)
    assert not inspect(tmp_path).problems
    AutoDrafter.from_pretrained(tmp_path)


def test_nothing_to_inspect_is_status_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "/no/such/folder"]) == 2
    assert main(["inspect", str(folder), "--target", "/no/such/target"]) == 2
    (folder / "config.json").write_text("{")
    assert main(["inspect", str(folder)]) == 2
    errors = capsys.readouterr().err
    assert all(words in errors for words in ("no such folder", "/no/such/target", "not JSON"))


def test_notes_are_told(folder: Path) -> None:
    edit(folder, dtype="float16")
    assert "runs in float16" in inspect(folder).notes[0]
