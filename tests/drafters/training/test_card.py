"""The model card tells what was done."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_dcut.drafters.dflash.config import DFlashConfig
from hf_dcut.drafters.training.card import Facts, card
from hf_dcut.drafters.training.recipe import Recipe

CONFIG = DFlashConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=101,
    block_size=8,
    mask_token_id=3,
    target_layer_ids=(1, 5),
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    draft_vocab_size=50,
)
FACTS = Facts(
    target="owner/model",
    prompts="prompts.jsonl",
    start="random",
    command="hf-dcut train --target owner/model",
    answers=1200,
    answer_tokens=34567,
    held_out=24,
    steps=10,
    seconds=120.0,
    tokens_per_step=2.345,
    place_acceptance=(0.5, 0.25),
)


def test_what_is_told() -> None:
    text = card(CONFIG, Recipe(steps=10), FACTS)
    assert text.startswith("---\nlibrary_name: hf-dcut\nbase_model: owner/model\n")
    for part in (
        "# DFlash drafter for model\n",
        "| target layers read, from 0 | 1, 5 |",
        "| draft vocabulary | 50 tokens |",
        "On 1,200 greedy answers of the target (34,567 tokens) to the prompts of `prompts.jsonl`; 24 more",
        "10 steps in 2 minutes",
        "    hf-dcut train --target owner/model\n",
        "| learning_rate | 0.0006 |",
        "2.35 tokens a step",
        "at place 1, 2, ..: 0.50, 0.25",
    ):
        assert part in text


@pytest.mark.parametrize("target", ["models/tiny", "/data/owner/model", "./model", "model"])
def test_a_folder_is_no_base_model(target: str) -> None:
    text = card(replace(CONFIG, draft_vocab_size=None), Recipe(), replace(FACTS, target=target, command=None))
    assert "base_model" not in text
    assert "| draft vocabulary | the target's |" in text
