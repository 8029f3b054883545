"""The `custom_generate` repository, used from its folder as Transformers uses one from the Hub."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_dcut
from hf_dcut.drafters.dflash import DFlashDrafter

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "custom_generate"
REMOTE = {"custom_generate": str(FOLDER), "trust_remote_code": True}
GREEDY = {"max_new_tokens": 16, "do_sample": False}


@pytest.fixture(scope="module")
def target(make_target: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return make_target("llama", eos_token_id=None)


@pytest.fixture(scope="module")
def drafter_folder(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    drafter = DFlashDrafter.random(target.config, taps=(0, 2), mask_token_id=0, block_size=4, layers=1)
    drafter.model.save_pretrained(folder)
    return folder


@pytest.fixture
def dcut(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every call that reaches `hf_dcut.generate`."""
    calls: list[dict[str, Any]] = []
    original = hf_dcut.generate

    def seen(model: PreTrainedModel, **arguments: Any) -> Any:
        calls.append(arguments)
        return original(model, **arguments)

    monkeypatch.setattr(hf_dcut, "generate", seen)
    return calls


@pytest.mark.parametrize("budget", [0.5, 1.0, "none"])
def test_output_is_the_models_own(
    target: PreTrainedModel, make_prompts: Callable[..., Any], dcut: list[dict[str, Any]], budget: float | str
) -> None:
    inputs = make_prompts(3)
    plain = target.generate(**inputs, **GREEDY)
    out = target.generate(**inputs, **GREEDY, **REMOTE, prompt_lookup_num_tokens=4, budget=budget)
    assert torch.equal(out, plain)
    (call,) = dcut
    assert call["dcut"] == budget


def test_drafter_by_name_and_loaded(
    target: PreTrainedModel, drafter_folder: Path, make_prompts: Callable[..., Any], dcut: list[dict[str, Any]]
) -> None:
    inputs = make_prompts(2)
    plain = target.generate(**inputs, **GREEDY)
    by_name = [target.generate(**inputs, **GREEDY, **REMOTE, drafter=str(drafter_folder), budget=0.5) for _ in range(2)]
    loaded = hf_dcut.AutoDrafter.from_pretrained(drafter_folder)
    by_object = target.generate(**inputs, **GREEDY, **REMOTE, drafter=loaded, budget=0.5)
    assert all(torch.equal(out, plain) for out in (*by_name, by_object))
    first, second, third = (call["assistant_model"] for call in dcut)
    assert first is second, "loaded once"
    assert third is loaded


@pytest.mark.parametrize("by", ["name", "option"])
def test_drafter_and_prompt_lookup(
    target: PreTrainedModel, drafter_folder: Path, make_prompts: Callable[..., Any], by: str
) -> None:
    inputs, suffix = make_prompts(2), "+lookup" if by == "name" else ""
    lookup = {"prompt_lookup_num_tokens": 4} if by == "option" else {}
    out = target.generate(**inputs, **GREEDY, **REMOTE, **lookup, drafter=f"{drafter_folder}{suffix}", budget=1.0)
    assert torch.equal(out, target.generate(**inputs, **GREEDY))


def test_statistics_come_along(target: PreTrainedModel, make_prompts: Callable[..., Any]) -> None:
    out = target.generate(
        **make_prompts(2), **GREEDY, **REMOTE, prompt_lookup_num_tokens=4, budget=1.0, return_dict_in_generate=True
    )
    assert out.stats.new_tokens == 32


def test_a_model_that_brings_the_folder(
    target: PreTrainedModel, tmp_path: Path, make_prompts: Callable[..., Any], dcut: list[dict[str, Any]]
) -> None:
    shutil.copytree(FOLDER, tmp_path / "repository")
    target.save_pretrained(tmp_path / "repository")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "repository", trust_remote_code=True)
    inputs = make_prompts(2)
    out = model.generate(**inputs, **GREEDY, prompt_lookup_num_tokens=4, budget=0.5)
    assert torch.equal(out, target.generate(**inputs, **GREEDY))
    assert len(dcut) == 1


@pytest.mark.parametrize("name", ["dcut", "assistant_model"])
def test_names_of_the_other_door_are_refused(
    target: PreTrainedModel, make_prompts: Callable[..., Any], name: str
) -> None:
    hf_dcut.disable()  # else `generate` itself refuses the mixture
    try:
        with pytest.raises(ValueError, match=f"{name} does not work with custom_generate: pass"):
            target.generate(**make_prompts(2), **GREEDY, **REMOTE, **{name: 0.5})
    finally:
        hf_dcut.enable()


def test_what_dcut_does_not_do_is_refused(target: PreTrainedModel, make_prompts: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="num_beams"):
        target.generate(**make_prompts(2), **GREEDY, **REMOTE, prompt_lookup_num_tokens=4, num_beams=2)


def test_nothing_runs_without_trust(target: PreTrainedModel, make_prompts: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        target.generate(**make_prompts(2), **GREEDY, custom_generate=str(FOLDER), trust_remote_code=False)


def test_the_card_is_found_by_the_hub() -> None:
    card = ModelCard.load(FOLDER / "README.md", ignore_metadata_errors=False).data
    assert card.library_name == "transformers"
    assert "custom_generate" in card.tags


@pytest.mark.slow
def test_the_cards_example_runs_where_hf_dcut_is_not_imported(smollm2: Path, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "repository")
    for path in smollm2.iterdir():
        (tmp_path / "repository" / path.name).symlink_to(path)
    (code,) = [part.partition("```")[0] for part in (FOLDER / "README.md").read_text().split("```python\n")[1:]]
    code = code.replace("owner/dcut", str(tmp_path / "repository")).replace("max_new_tokens=32", "max_new_tokens=8")
    code = code.replace("do_sample=False", "do_sample=False, budget=0.5")
    assert "hf_dcut" not in code
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("['one two three one two three one"), done.stderr
