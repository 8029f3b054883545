"""Weights to begin with: random, from the target's last layers, or of a drafter that exists.

A draft layer has the shape of a target layer, so the last layers of the target, which turn hidden states into the next
token, can be copied. The context then starts as the last tap alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dcut.drafters.dflash import DFlashDrafter, DFlashModel
from hf_dcut.drafters.dflash.model import DFlashLayer

_COPIED = (
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
_COPIED_IF_THERE = ("self_attn.q_norm", "self_attn.k_norm")


def spread_taps(layers: int, count: int = 5) -> tuple[int, ...]:
    """Returns `count` layers of a target of so many, evenly from the second to the fourth from the end."""
    last = max(1, layers - 3)
    if not 0 < count <= last:
        raise ValueError(
            f"taps={count}: a target of {layers} layers has 1 to {last} places for them; name layers instead"
        )
    return (layers // 2,) if count == 1 else tuple(round(1 + i * (last - 1) / (count - 1)) for i in range(count))


def start_weights(
    start: str | os.PathLike[str],
    target: PreTrainedModel,
    layers: Sequence[nn.Module],
    *,
    taps: Sequence[int],
    mask_token_id: int,
    block_size: int | None,
    depth: int,
    draft_ids: Sequence[int] | None,
    seed: int,
    dtype: torch.dtype,
) -> DFlashModel:
    """Returns the weights that training begins with, on the CPU.

    Args:
        start: "random", "target" for copies of the target's last layers, or a drafter's folder or Hub id; the shape is
            then that drafter's, and of what follows only the block size matters.
        target: the model to draft for.
        layers: its decoder layers.
        block_size: the anchor and the drafts after it; None for 16, or for what the drafter has.
        taps, mask_token_id, draft_ids, seed: as in `DFlashDrafter.random`.
        depth: layers of the drafter.
        dtype: of the weights in training.

    Raises:
        ValueError: target layers that cannot be copied, or a drafter that does not fit the target.
    """
    if start not in ("random", "target"):
        drafter = DFlashDrafter.from_pretrained(start, dtype=dtype, device=target.device)
        drafter.check(target)
        _check_plain(drafter.model, start)
        model = drafter.model.to("cpu")
        model.config = replace(model.config, block_size=block_size or model.config.block_size)
        return model
    model = DFlashDrafter.random(
        target.config,
        taps=taps,
        mask_token_id=mask_token_id,
        block_size=block_size or 16,
        layers=depth,
        draft_ids=draft_ids,
        seed=seed,
        dtype=dtype,
    ).model
    if start == "target":
        _copy_last_layers(model, target, layers)
    return model


def _check_plain(model: DFlashModel, start: object) -> None:
    """Raises ValueError when a drafter does maths that the training forward does not."""
    config = model.config
    parts = {
        "windows or causal layers": any(config.sight(i) != (None, False) for i in range(config.num_hidden_layers)),
        "attention sinks": config.attention_sink_bias,
        "convolutions": config.conv_kernel_size is not None,
        "a candidate selector": config.selector_rank is not None,
        "a draft at the anchor's position": config.sample_from_anchor,
        "embeddings or a head of its own": any(
            part is not None for part in (model.embed_tokens, model.lm_head, model.mask_embedding)
        ),
    }
    found = [name for name, there in parts.items() if there]
    if found:
        raise ValueError(
            f"start={start!r} has {', '.join(found)}: training goes on from plain DFlash drafters. "
            "Start from 'random' or 'target'"
        )


@torch.no_grad()
def _copy_last_layers(model: DFlashModel, target: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
    if len(model.layers) > len(layers):
        raise ValueError(
            f"start='target': the target has {len(layers)} layers to copy, the drafter {len(model.layers)}"
        )
    for own, source in zip(model.layers, list(layers)[-len(model.layers) :], strict=True):
        for name in _COPIED:
            _copy(own, source, name, target)
        for name in _COPIED_IF_THERE:
            if name in dict(source.named_modules()):
                _copy(own, source, name, target)
    width = model.config.hidden_size
    model.fc.weight.zero_()[:, -width:] = torch.eye(width)
    # The context skips the input norm of the layers it goes into.
    model.hidden_norm.weight.copy_(cast(DFlashLayer, model.layers[0]).input_layernorm.weight)
    final = getattr(target.get_decoder(), "norm", None)
    if final is not None and isinstance(weight := getattr(final, "weight", None), Tensor):
        model.norm.weight.copy_(weight)


def _copy(own: nn.Module, source: nn.Module, name: str, target: PreTrainedModel) -> None:
    found = dict(source.named_modules()).get(name)
    weight, wanted = getattr(found, "weight", None), own.get_parameter(f"{name}.weight")
    if not isinstance(weight, Tensor) or weight.shape != wanted.shape:
        shape = "is missing" if weight is None else f"is {tuple(weight.shape)}"
        raise ValueError(
            f"start='target': {name} of {type(target).__name__}'s layers {shape}, the drafter's is "
            f"{tuple(wanted.shape)}. Use start='random'"
        )
    wanted.copy_(weight)
