"""What training begins with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_dcut.drafters.dflash import DFlashDrafter, DFlashModel
from hf_dcut.drafters.training.start import spread_taps, start_weights


def begin(target: PreTrainedModel, start: Any, **options: Any) -> DFlashModel:
    settings = {"taps": (0, 2), "mask_token_id": 3, "block_size": 5, "depth": 2, "draft_ids": None, "seed": 0}
    layers = list(target.get_decoder().layers)
    return start_weights(start, target, layers, **(settings | {"dtype": torch.float64} | options))


@pytest.mark.parametrize(
    ("layers", "taps"), [(36, (1, 9, 17, 25, 33)), (30, (1, 8, 14, 20, 27)), (32, (1, 8, 15, 22, 29))]
)
def test_taps_are_spread_as_published_drafters_have_them(layers: int, taps: tuple[int, ...]) -> None:
    assert spread_taps(layers) == taps


def test_few_layers_have_few_taps() -> None:
    assert spread_taps(3, 1) == (1,)
    with pytest.raises(ValueError, match="a target of 3 layers has 1 to 1 places"):
        spread_taps(3)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_last_layers_of_the_target(make_target: Callable[..., PreTrainedModel], kind: str) -> None:
    target = make_target(kind)
    with torch.no_grad():
        for weight in target.parameters():
            weight.add_(torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    model, layers = begin(target, "target"), target.get_decoder().layers
    for own, source in zip(model.layers, layers[1:], strict=True):
        theirs = source.state_dict()
        for name, tensor in own.state_dict().items():
            if name in theirs:
                assert torch.equal(tensor, theirs[name]), name
            else:
                assert name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
                assert kind == "llama"
    taps = torch.randn(4, 128, dtype=torch.float64)
    normed = nn.functional.rms_norm(taps[:, 64:], (64,), layers[1].input_layernorm.weight, model.config.rms_norm_eps)
    assert torch.allclose(model.context(taps), normed)
    assert torch.equal(model.norm.weight, target.get_decoder().norm.weight)


def test_layers_that_cannot_be_copied(make_target: Callable[..., PreTrainedModel]) -> None:
    target = make_target("llama")
    with pytest.raises(ValueError, match="the target has 3 layers to copy, the drafter 4"):
        begin(target, "target", depth=4)
    target.get_decoder().layers[2].mlp.up_proj = nn.Identity()
    with pytest.raises(ValueError, match=r"mlp\.up_proj of LlamaForCausalLM's layers is missing.*start='random'"):
        begin(target, "target")


def test_a_drafter_keeps_its_shape(make_target: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    target = make_target("llama")
    before = DFlashDrafter.random(target.config, taps=(1,), mask_token_id=4, block_size=3, layers=1, draft_ids=[2, 7])
    before.save_pretrained(tmp_path)
    model = begin(target, tmp_path, block_size=None)
    assert (model.config.block_size, model.config.target_layer_ids) == (3, (1,))
    assert begin(target, tmp_path, block_size=7).config.block_size == 7
    assert model.fc.weight.dtype == torch.float64
    assert torch.equal(model.fc.weight.float(), before.model.fc.weight)


def test_a_drafter_of_another_target_is_refused(make_target: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    other = make_target("llama", hidden_size=32)
    DFlashDrafter.random(other.config, taps=(1,), mask_token_id=4).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="hidden_size=32, but the target has 64"):
        begin(make_target("llama"), tmp_path)


def test_maths_that_training_does_not_do_is_refused(
    make_target: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    target = make_target("llama")
    before = DFlashDrafter.random(target.config, taps=(1,), mask_token_id=4, block_size=3, layers=1)
    windowed = replace(before.config, layer_types=("sliding_attention",), sliding_window=8)
    model = DFlashModel(windowed)
    model.load_state_dict(before.model.state_dict())
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="windows or causal layers: training goes on from plain DFlash drafters"):
        begin(target, tmp_path)
