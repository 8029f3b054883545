"""The prepared folder is SmolLM2-135M-Instruct as its makers mean it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def model(smollm2: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(smollm2)


def test_model_is_a_plain_llama_in_float32(model: PreTrainedModel) -> None:
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not hasattr(model.config, "quantization_config")
    assert (model.config.eos_token_id, model.config.pad_token_id) == (2, 2)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)


def test_tokenizer_knows_the_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer("<|im_start|>user\nhi<|im_end|>\n").input_ids == [1, 4093, 198, 6004, 2, 198]


def test_tokenizer_splits_digits_first(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.tokenize("a\n\n34") == ["a", "ĊĊ", "3", "4"]
    assert tokenizer.tokenize("x  = 10") == ["x", "Ġ", "Ġ=", "Ġ", "1", "0"]


def test_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "  def f(x):\n\treturn x + 1  # don't, naïve, 日本, ½\n\n\n7"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_model_answers_through_the_chat_template(tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    text = model.generate(**inputs, do_sample=False, max_new_tokens=16)[0, inputs.input_ids.shape[1] :]
    assert tokenizer.decode(text) == "The capital of France is Paris.<|im_end|>"
