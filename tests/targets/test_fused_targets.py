"""What only some targets ask of attention, on the fused kernel: in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from target_table import CASES

from hf_dcut import attention
from hf_dcut.drafters.base import Drafter


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Gemma 2", "GPT-OSS", "DeepSeek-V3"])
def test_generates_what_the_target_does(
    name: str,
    make_prompts: Callable[..., dict[str, torch.Tensor]],
    knowing: Callable[..., Drafter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    device, calls = "cuda" if torch.cuda.is_available() else "cpu", []
    ragged = attention.ragged_attention

    def counted(*given: Any, path: str, **options: Any) -> torch.Tensor:
        calls.append(path)
        return ragged(*given, path=path, **options)

    monkeypatch.setattr(attention, "attention_path", lambda *given: "triton")
    monkeypatch.setattr(attention, "ragged_attention", counted)
    case = next(case for case in CASES if case.name == name)
    model = replace(case, dtype=torch.float32).build("eager").to(device)
    inputs = {name: x.to(device) for name, x in make_prompts(3, longest=8).items()}
    options = {"max_new_tokens": 6, "do_sample": False}
    plain = model.generate(**inputs, **options)
    output = model.generate(**inputs, **options, assistant_model=knowing(inputs, plain, 4), dcut=0.5)
    assert torch.equal(output, plain)
    assert set(calls) == {"triton"}
