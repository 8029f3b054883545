"""The models of a job: told apart by their content, read without running anything of theirs."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_dcut.drafters.prompt_lookup import PromptLookupDrafter
from hf_dcut.jobs.models import identity, load_drafter, load_target
from hf_dcut.jobs.plan import Plan

Make = Callable[..., Plan]
CPU = torch.device("cpu")


@pytest.fixture
def copy(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "copy"))


def test_a_copy_is_the_same_model(tiny_folder: Path, copy: Path) -> None:
    assert identity(str(tiny_folder), None) == identity(str(copy), None)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"])
def test_a_changed_text_is_another_model(tiny_folder: Path, copy: Path, name: str) -> None:
    (copy / name).write_text((copy / name).read_text() + " ")
    assert identity(str(tiny_folder), None) != identity(str(copy), None)


def test_other_weights_are_another_model(tiny_folder: Path, copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    save_file({name: tensor + 1e-9 for name, tensor in tensors.items()}, copy / "model.safetensors", {"format": "pt"})
    assert identity(str(tiny_folder), None) != identity(str(copy), None)


def test_a_commit_names_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789" * 4
    snapshot = tmp_path / "models--owner--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "models--owner--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert identity("owner/name", None) == commit
    assert identity("owner/name", commit) == commit


def test_what_is_no_model_is_named(tmp_path: Path, tiny_folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="'/no/such/folder' is no folder, and no Hub repository"):
        identity("/no/such/folder", None)
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        identity(str(tmp_path), None)
    with pytest.raises(ValueError, match="is a folder, which has no revisions"):
        identity(str(tiny_folder), "main")


class Boom:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.marker,)


def test_pickled_weights_are_refused_unread(make_plan: Make, copy: Path, tmp_path: Path) -> None:
    (copy / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.bin", "model.pt"):
        (copy / name).write_bytes(pickle.dumps(Boom(tmp_path / "ran")))
    with pytest.raises(OSError, match="safetensors"):
        load_target(make_plan(target=str(copy)), None, CPU)
    assert not (tmp_path / "ran").exists()


def test_code_of_a_model_runs_only_if_asked_for(make_plan: Make, copy: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (copy / "modeling.py").write_text(
        f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Config(LlamaConfig):\n    model_type = 'strange'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    )
    config = (copy / "config.json").read_text()
    config = config.replace('"model_type": "llama"', '"model_type": "strange"')
    auto = '{"auto_map": {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}, '
    (copy / "config.json").write_text(config.replace("{", auto, 1))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_target(make_plan(target=str(copy)), None, CPU)
    assert not marker.exists()
    load_target(make_plan(target=str(copy), trust_remote_code=True), None, CPU)
    assert marker.exists()


def test_target_is_loaded_as_asked(make_plan: Make) -> None:
    model, tokenizer = load_target(make_plan(dtype="bfloat16"), None, CPU)
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert tokenizer.decode(tokenizer("Grü e")["input_ids"]) == "Grü e"


def test_drafters(make_plan: Make) -> None:
    assert load_drafter(make_plan(drafter="none"), None, CPU) is None
    assert isinstance(load_drafter(make_plan(drafter="lookup"), None, CPU), PromptLookupDrafter)
    for name in ("/no/such", "/no/such+lookup"):
        assert make_plan(drafter=name).drafter_source == "/no/such"
        with pytest.raises(FileNotFoundError, match="no/such"):
            load_drafter(make_plan(drafter=name), None, CPU)
    assert [make_plan(drafter=name).drafter_source for name in ("none", "lookup")] == [None, None]


def test_names_of_no_drafter(make_plan: Make) -> None:
    with pytest.raises(ValueError, match=r"drafter 'lookup\+lookup': give a folder or Hub id, lookup or suffix"):
        make_plan(drafter="lookup+lookup")
    with pytest.raises(ValueError, match=r"drafter 'none\+lookup': .*Give lookup"):
        make_plan(drafter="none+lookup")
