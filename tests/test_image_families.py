"""Further vision-language models, whose images are read by their own forward and take plain positions: float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    Idefics3Config,
    InternVLConfig,
    LlavaConfig,
    Mistral3Config,
    PaliGemmaConfig,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen3_5Config,
)

from hf_dcut.drafters import DFlashDrafter
from hf_dcut.trial import check_model

Inputs = dict[str, torch.Tensor]
IMAGE = 97
TEXT: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SQUARE = VISION | {"image_size": 16, "patch_size": 4}
PATCHES = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}

# Config, tokens of an image, and the shape of one image's pixels.
FAMILIES: dict[str, tuple[Callable[[], Any], int, tuple[int, ...]]] = {
    "llava": (
        lambda: LlavaConfig(
            text_config=TEXT | {"model_type": "llama"},
            vision_config=SQUARE | {"model_type": "clip_vision_model", "projection_dim": 32},
            image_token_index=IMAGE,
            image_seq_length=16,
        ),
        16,
        (1, 3, 16, 16),
    ),
    "idefics 3": (
        lambda: Idefics3Config(
            text_config=TEXT | {"model_type": "llama"}, vision_config=SQUARE, image_token_id=IMAGE, scale_factor=2
        ),
        4,
        (1, 1, 3, 16, 16),
    ),
    "intern vl": (
        lambda: InternVLConfig(
            text_config=TEXT | {"model_type": "qwen2"},
            vision_config=VISION | {"model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]},
            image_token_id=IMAGE,
            downsample_ratio=0.5,
        ),
        4,
        (1, 3, 16, 16),
    ),
    "mistral 3": (
        lambda: Mistral3Config(
            text_config=TEXT | {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
            vision_config=SQUARE | {"model_type": "pixtral", "head_dim": 16},
            image_token_index=IMAGE,
            spatial_merge_size=2,
        ),
        4,
        (1, 3, 16, 16),
    ),
    "qwen2 vl": (
        lambda: Qwen2VLConfig(
            text_config=TEXT | {"rope_parameters": ROPE}, vision_config=PATCHES, image_token_id=IMAGE, video_token_id=98
        ),
        4,
        (16, 3 * 2 * 4 * 4),
    ),
}


def build(config: Any) -> PreTrainedModel:
    """Returns a model whose weights are large enough for images to be seen."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float64).eval()
        for weight in model.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.2)
    return model


def prompts(family: str, tokens: int, shape: tuple[int, ...]) -> Inputs:
    """Returns two prompts with an image each, one of them padded on the left."""
    image = [95, *[IMAGE] * tokens, 96]
    ids = torch.tensor([[5, 6, *image, 7, 8], [0, 0, 0, *image, 9]])
    pixels = torch.randn(2, *shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long(), "pixel_values": pixels.flatten(0, 1)}
    if family == "qwen2 vl":
        grid = torch.tensor([[1, 4, 4]] * 2)
        inputs |= {"mm_token_type_ids": (ids == IMAGE).long(), "image_grid_thw": grid}
    elif family == "mistral 3":
        inputs["image_sizes"] = torch.tensor([[16, 16]] * 2)
    elif family == "idefics 3":
        inputs["pixel_values"] = pixels.squeeze(1)
    return inputs


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_plain_generate(family: str) -> None:
    config, tokens, shape = FAMILIES[family]
    model, inputs = build(config()), prompts(family, tokens, shape)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    plain = model.generate(**inputs, **options)
    other = model.generate(**inputs | {"pixel_values": -inputs["pixel_values"]}, **options)
    assert not torch.equal(plain, other), "the images are seen"
    block: dict[str, Any] = {"mask_token_id": 3, "block_size": 5, "layers": 2, "dtype": torch.float64}
    for drafter in (
        {"assistant_model": DFlashDrafter.random(model.config, taps=[0], **block)},
        {"prompt_lookup_num_tokens": 3},
    ):
        assert torch.equal(model.generate(**inputs, **options, **drafter, dcut=0.5), plain)


def test_prompts_that_see_themselves_both_ways_are_refused() -> None:
    config = PaliGemmaConfig(
        text_config=TEXT | {"model_type": "gemma", "head_dim": 16},
        vision_config=SQUARE | {"model_type": "siglip_vision_model", "projection_dim": 64, "vision_use_head": False},
        image_token_index=IMAGE,
        projection_dim=64,
    )
    with pytest.raises(ValueError, match=r"PaliGemma.* gives other logits for packed rows.*without dcut"):
        check_model(build(config))


def test_images_in_front_of_recurrent_layers_are_refused_and_text_is_not() -> None:
    recurrent = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "head_dim": 16}
    recurrent |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2}
    rope = ROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}
    eyes = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
    eyes |= {"spatial_merge_size": 2, "out_hidden_size": 64, "num_position_embeddings": 16}
    model = build(
        Qwen3_5Config(
            text_config=TEXT | recurrent | {"rope_parameters": rope}, vision_config=eyes, image_token_id=IMAGE
        )
    )
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "prompt_lookup_num_tokens": 3}
    with pytest.raises(ValueError, match=r"Qwen3_5ForConditionalGeneration has recurrent layers.*leave images out"):
        model.generate(**prompts("qwen2 vl", 4, (16, 3 * 2 * 4 * 4)), **options, dcut=0.5)
    ids = torch.tensor([[5, 6, 5, 6, 5], [9, 8, 9, 8, 9]])
    mask = torch.ones_like(ids)
    text = model.generate(ids, attention_mask=mask, **options, dcut=0.5)
    del options["prompt_lookup_num_tokens"]
    assert torch.equal(text, model.generate(ids, attention_mask=mask, **options))
