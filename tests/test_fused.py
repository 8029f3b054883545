"""Whole generations on the fused kernels, in Triton's interpreter where there is no GPU: the output is the target's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_dcut
from hf_dcut import attention, ragged, selecting

# One full layer, then two with a window shorter than the text.
WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["auto", 0.5])
def test_generates_what_the_target_does(
    budget: str | float,
    make_target: Callable[..., Any],
    make_prompts: Callable[..., dict[str, torch.Tensor]],
    knowing: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    calls = {"attention": 0, "select": 0}

    def count(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*given, **options)

        return counted

    monkeypatch.setattr(attention, "attention_path", lambda *given: "triton")
    monkeypatch.setattr(ragged, "packed_attention", count("attention", ragged.packed_attention))
    monkeypatch.setattr(selecting, "select_path", lambda *given: "triton")
    monkeypatch.setattr("hf_dcut.kernels.select_path", lambda *given: "triton")
    monkeypatch.setattr(selecting, "select_at_once", count("select", selecting.select_at_once))
    target = make_target("qwen3", dtype=torch.float32, eos_token_id=None, **WINDOWS).to(device)
    prompts = {name: x.to(device) for name, x in make_prompts(3, longest=8).items()}
    plain = target.generate(**prompts, max_new_tokens=8, do_sample=False)
    drafter = knowing(prompts, plain, draft_tokens=4)
    costs = hf_dcut.CostTable.from_rows({2: {0: 1.0, 2: 1.0, 6: 1.1, 10: 1.5}}, draft_tokens=4)
    config = {"budget": budget, "cost_table": costs} if budget == "auto" else {"budget": budget}
    rows = target.generate(**prompts, max_new_tokens=8, do_sample=False, assistant_model=drafter, dcut=config)
    assert torch.equal(rows, plain)
    assert calls["select"] > 0
    assert calls["attention"] >= 3 * calls["select"], "in each of three layers"
