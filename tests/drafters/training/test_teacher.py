"""The target's probabilities, told from the states its head reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, PreTrainedModel

from hf_dcut.drafters.training import Answer
from hf_dcut.drafters.training.teacher import Teacher, check_head
from hf_dcut.taps import tap_reader


@torch.no_grad()
def test_probabilities_are_those_of_the_target(make_target: Callable[..., PreTrainedModel]) -> None:
    target = make_target("llama")
    check_head(target)
    answer = Answer((7, 8, 60, 61, 62), 2)
    with tap_reader(target, (1,), final=True) as read:
        states = read([answer])[:, -target.config.hidden_size :]
    teacher = Teacher(states, target.get_output_embeddings(), 0.75)
    wanted = 0.75 * target(torch.tensor([answer.ids])).logits[0, 2:4].softmax(-1)
    wanted[0, 61] += 0.25
    wanted[1, 62] += 0.25
    assert torch.allclose(teacher.wanted(torch.tensor([61, 62]), 2), wanted, rtol=0, atol=1e-12)


def test_a_target_that_caps_its_logits_is_refused() -> None:
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "head_dim": 8, "intermediate_size": 32}
    target = AutoModelForCausalLM.from_config(Gemma2Config(**sizes, final_logit_softcapping=0.1))
    with pytest.raises(ValueError, match="does more to its logits than its head does") as caught:
        check_head(target)
    assert "Train with soft=0" in str(caught.value)
