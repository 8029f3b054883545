"""Random DFlash drafters for the tiny targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_dcut.drafters.dflash import DFlashDrafter, DFlashModel

MASK = 3


def build_drafter(
    target: PreTrainedModel,
    attention_bias: bool = False,
    seed: int = 0,
    features: dict[str, Any] | None = None,
    own: tuple[str, ...] = (),
    **options: Any,
) -> DFlashDrafter:
    """Returns a drafter in which every weight, norms and biases too, is far from its neutral value.

    Args:
        target: the model to draft for.
        attention_bias: whether the attention projections have biases.
        seed: of the weights.
        features: fields of its `DFlashConfig` to change.
        own: tables it brings along, as `DFlashModel` takes them.
        options: as `DFlashDrafter.random` takes them.
    """
    settings = {"taps": (0, 2), "mask_token_id": MASK, "block_size": 5, "layers": 2, "dtype": target.dtype} | options
    dtype = settings.pop("dtype")
    plain = DFlashDrafter.random(target.config, dtype=dtype, **settings)
    config = replace(plain.config, attention_bias=attention_bias, **(features or {}))
    model = DFlashModel(config, own).to(dtype).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.normal_(float(weight.ndim == 1), 0.3, generator=generator)
    model.d2t = plain.model.d2t
    return DFlashDrafter(model.eval())


@pytest.fixture
def make_drafter() -> Callable[..., DFlashDrafter]:
    """`make_drafter(target, attention_bias=False, seed=0, features=None, own=(), **options)`, of `random`."""
    return build_drafter
