"""The prepared folder is SmolLM2-135M-Instruct as its makers mean it."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "prepare_smollm2.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_smollm2", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_pieces_make_the_file_again(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(range(256)) * 41
    whole, folder = tmp_path / "m.gguf", tmp_path / "pieces"
    whole.write_bytes(content)
    monkeypatch.setattr(script.check, "__defaults__", (hashlib.sha256(content).hexdigest(),))
    script.split(whole, folder, 512)
    pieces = script.split(whole, folder, 1000)
    assert sorted(folder.iterdir()) == pieces, "those of an earlier split are gone"
    assert [piece.stat().st_size for piece in pieces] == [1000] * 10 + [496]
    (tmp_path / "new").mkdir()
    assert script.join(folder, tmp_path / "new", "m.gguf").read_bytes() == content
    pieces[3].unlink()
    with pytest.raises(RuntimeError, match=r"m.gguf, joined from 10 pieces, has SHA-256 .*, expected"):
        script.join(folder, tmp_path / "new", "m.gguf")
    with pytest.raises(FileNotFoundError, match=r"holds no m.gguf.00: make the pieces with --split"):
        script.join(tmp_path, tmp_path / "new", "m.gguf")
