"""Windows hold after thousands of cells, whoever knows of them: the model's code, or its masks alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from target_cases import WINDOW
from target_table import CASES
from transformers import PreTrainedModel

from hf_dcut.drafters.base import Drafter
from hf_dcut.target import Target

LONG, NEW, D = 2050, 6, 4
WINDOWED = ("Mistral", "Gemma 3, text", "GPT-OSS", "Phi-3.5-MoE")


@pytest.mark.parametrize("name", WINDOWED)
def test_long_texts(name: str, knowing: Callable[..., Drafter]) -> None:
    case = next(case for case in CASES if case.name == name)
    model: PreTrainedModel = case.build(max_position_embeddings=4096)
    assert WINDOW in {shape.window for shape in Target(model).shapes}
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(3, 101, (1, LONG), generator=generator)
    options = {"do_sample": False, "max_new_tokens": NEW}
    rows = [prompt, prompt[:, -7:]]
    said = [model.generate(row, attention_mask=torch.ones_like(row), **options)[:, -NEW:] for row in rows]
    mask = torch.ones(2, LONG, dtype=torch.int64)
    mask[1, :-7] = 0
    inputs = {"input_ids": torch.where(mask.bool(), prompt, 0), "attention_mask": mask}
    expected = torch.cat([inputs["input_ids"], torch.cat(said)], dim=1)
    output = model.generate(**inputs, **options, assistant_model=knowing(inputs, expected, D), dcut=0.5)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("name", WINDOWED)
def test_the_window_matters(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    prompt = torch.arange(3, 40)[None]
    with torch.no_grad():
        logits = [case.build(sliding_window=window)(prompt).logits[0, -1] for window in (WINDOW, WINDOW + 1)]
    assert not torch.allclose(*logits, rtol=1e-3)
