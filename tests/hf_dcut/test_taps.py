"""Taps of whole texts: layer outputs, row by row, whatever stands beside them in the batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_dcut.drafters.training import Answer
from hf_dcut.taps import tap_reader

ANSWERS = [Answer((5, 17, 40), 1), Answer((9,), 1), Answer((7, 8, 60, 61, 62), 2)]


@torch.no_grad()
def test_rows_are_layer_outputs(make_target: Callable[..., PreTrainedModel]) -> None:
    target = make_target("qwen3")
    with tap_reader(target, (1, 0)) as read:
        rows = read(ANSWERS).split([len(a) for a in ANSWERS])
    for answer, row in zip(ANSWERS, rows, strict=True):
        # hidden_states[0] is what goes into layer 0.
        states = target(torch.tensor([answer.ids]), output_hidden_states=True).hidden_states
        assert torch.allclose(row, torch.cat([states[2][0], states[1][0]], dim=-1), rtol=0, atol=1e-12)


@torch.no_grad()
def test_the_last_layer_is_read_before_the_final_norm(make_target: Callable[..., PreTrainedModel]) -> None:
    target = make_target("llama")
    with tap_reader(target, (2,)) as read:
        row = read(ANSWERS[2:])
    normed = target(torch.tensor([ANSWERS[2].ids]), output_hidden_states=True).hidden_states[-1][0]
    assert torch.allclose(target.get_decoder().norm(row), normed, rtol=0, atol=1e-12)


@torch.no_grad()
def test_what_the_head_reads_follows_behind(make_target: Callable[..., PreTrainedModel]) -> None:
    target = make_target("llama")
    with tap_reader(target, (1,), final=True) as read:
        rows = read(ANSWERS).split([len(a) for a in ANSWERS])
    for answer, row in zip(ANSWERS, rows, strict=True):
        found = target(torch.tensor([answer.ids]), output_hidden_states=True)
        assert torch.allclose(row, torch.cat([found.hidden_states[2][0], found.hidden_states[-1][0]], -1), atol=1e-12)
        assert torch.allclose(target.lm_head(row[:, target.config.hidden_size :]), found.logits[0], atol=1e-12)


def test_no_hook_stays_behind(make_target: Callable[..., PreTrainedModel]) -> None:
    target = make_target("llama")
    with tap_reader(target, (0, 2)):
        pass
    assert not any(layer._forward_hooks for layer in target.get_decoder().layers)


@pytest.mark.parametrize("taps", [(3,), (-1, 0), ()])
def test_taps_beyond_the_target_are_refused(make_target: Callable[..., PreTrainedModel], taps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="layers of the target, 0 to 2"), tap_reader(make_target("llama"), taps):
        pass


def test_a_target_without_layers_is_refused_by_what_is_missing(make_target: Callable[..., PreTrainedModel]) -> None:
    target = make_target("llama")
    target.get_decoder().layers = nn.Identity()
    with (
        pytest.raises(ValueError, match=r"LlamaForCausalLM shows no list .* get_decoder\(\)\.layers"),
        tap_reader(target, (0,)),
    ):
        pass
