"""Targets of many makes with compiled norms and MLPs: the same text, or a refusal that names the model."""

from __future__ import annotations

import pytest
import torch
from target_table import CASES

from hf_dcut import compiling
from hf_dcut.compiling import parts_of
from hf_dcut.target import decoder_layers

COMPILED = {
    "Gemma 3n, text": {"Gemma3nTextMLP", "Gemma3nRMSNorm", "Gemma3nTextAltUp", "Gemma3nTextLaurelBlock"},
    "GPT-NeoX": {"GPTNeoXMLP"},
    "Cohere 2": {"Cohere2MLP", "Cohere2LayerNorm"},
    "GPT-OSS": {"GptOssRMSNorm"},
    "DeepSeek-V3": {"DeepseekV3MLP", "DeepseekV3RMSNorm"},
    "Qwen3.5": {"Qwen3_5MLP", "Qwen3_5RMSNorm"},
}
REFUSED = ("OPT", "GPT-2", "Phi-3.5-MoE")


@pytest.mark.parametrize("name", [*COMPILED, *REFUSED])
def test_generates_what_the_target_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    case = next(case for case in CASES if case.name == name)
    model, ids = case.build(case.attentions[0]), torch.tensor([[5, 6, 7, 5, 6], [8, 9, 5, 8, 9]])
    options = {"input_ids": ids, "max_new_tokens": 8, "do_sample": False}
    dcut = {"dcut": {"budget": 0.6, "compile": True}, "prompt_lookup_num_tokens": 3}
    if name in REFUSED:
        with pytest.raises(ValueError, match=f"compile=True: {type(model).__name__} shows no norms or MLPs"):
            model.generate(**options, **dcut)
        return
    assert {type(part).__name__ for part in parts_of(decoder_layers(model) or ())} == COMPILED[name]
    assert torch.equal(model.generate(**options, **dcut), model.generate(**options))
    torch._dynamo.reset()
