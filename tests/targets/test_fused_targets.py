"""What only some targets ask of attention, on the fused kernel: in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from target_table import CASES

from hf_dcut import assembly, attention, ragged
from hf_dcut.assembly import attention_name
from hf_dcut.drafters.base import Drafter
from hf_dcut.target import Target


@pytest.mark.parametrize(
    ("name", "on_cpu", "on_gpu"),
    [
        ("Llama 2, Llama 3", "packed sdpa", "varlen"),
        ("Gemma 2", "packed torch", "triton"),
        ("GPT-OSS", "packed torch", "triton"),
        ("DeepSeek-V3", "packed sdpa", "varlen"),
    ],
)
def test_the_name_of_the_attention_is_that_of_what_runs(
    name: str, on_cpu: str, on_gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soft caps and sinks shut out varlen attention; latent heads are as wide as they are when they attend."""
    asked = set()

    def path(device: torch.device, dtype: torch.dtype, *heads: Any) -> str:
        asked.add(heads)
        return "reference"

    monkeypatch.setattr(attention, "attention_path", path)
    model = next(case for case in CASES if case.name == name).build("eager")
    with Target(model) as target:
        assert asked == set(target.heads), "as in the forward"
        assert ({heads[:2] for heads in asked} == {(12, 6)}) == (name == "DeepSeek-V3")
        assert attention_name(target) == on_cpu
        monkeypatch.setattr(assembly, "attention_path", lambda *given: "triton" if given[-1] else "varlen")
        assert attention_name(target) == on_gpu


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
    attend = ragged.packed_attention

    def counted(*given: Any, path: str, **options: Any) -> torch.Tensor:
        calls.append(path)
        return attend(*given, path=path, **options)

    monkeypatch.setattr(attention, "attention_path", lambda *given: "triton")
    monkeypatch.setattr(ragged, "packed_attention", counted)
    case = next(case for case in CASES if case.name == name)
    model = replace(case, dtype=torch.float32).build("eager").to(device)
    inputs = {name: x.to(device) for name, x in make_prompts(3, longest=8).items()}
    options = {"max_new_tokens": 6, "do_sample": False}
    plain = model.generate(**inputs, **options)
    output = model.generate(**inputs, **options, assistant_model=knowing(inputs, plain, 4), dcut=0.5)
    assert torch.equal(output, plain)
    assert set(calls) == {"triton"}
