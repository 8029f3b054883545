"""Rotary embedding of a drafter: plain, scaled as Transformers scales it, or of a part of each head.

Frequencies are computed where they are used: as a buffer of the model they would be rounded by `model.to(bfloat16)`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_dcut.drafters.dflash.config import DFlashConfig


class Rope:
    """From positions to the table that `rotate` takes.

    Args:
        config: of the drafter.
        dtype: of the table.
        device: where positions are.
    """

    def __init__(self, config: DFlashConfig, dtype: torch.dtype, device: torch.device | str):
        self.frequencies, self.dtype = rope_frequencies(config, dtype, device), dtype
        self.scale = 1.0 if config.rope_scaling is None else _scaled(config)[1]

    def __call__(self, position: Tensor) -> Tensor:
        """Returns cosines and sines [2, ..., 1, rotary dims] of positions int64 [...], for all heads alike."""
        return rope_table(position, self.frequencies, self.dtype, self.scale)


def rope_frequencies(config: DFlashConfig, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Returns the rotary frequencies [rotary dims / 2] in `dtype`, but at least in float32."""
    wide, dim = torch.promote_types(dtype, torch.float32), config.rotary_dim
    if config.rope_scaling is not None:
        return _scaled(config)[0].to(device, wide)
    return config.rope_theta ** (torch.arange(0, dim, 2, dtype=wide, device=device) / -dim)


def rope_table(position: Tensor, frequencies: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Returns cosines and sines [2, ..., 1, rotary dims] of positions int64 [...], for all heads alike.

    Args:
        position: of each row.
        frequencies: from `rope_frequencies`.
        dtype: of the table.
        scale: factor on the table, by which YaRN sharpens attention.
    """
    angle = position[..., None] * frequencies
    angle = torch.cat((angle, angle), dim=-1)[..., None, :]
    return (torch.stack((angle.cos(), angle.sin())) * scale).to(dtype)


def rotate(heads: Tensor, rope: Tensor) -> Tensor:
    """Returns `heads` [..., heads, head_dim] rotated by their positions, as far as the table goes.

    The first half of the rotated dimensions turns against the second; what lies behind them stays.
    """
    cosine, sine = rope
    turned, rest = heads.tensor_split([cosine.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cosine + torch.cat((-second, first), dim=-1) * sine
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def _scaled(config: DFlashConfig) -> tuple[Tensor, float]:
    """Returns frequencies and the factor on the table of a scaled RoPE, from Transformers."""
    assert config.rope_scaling is not None
    parameters = {
        **config.rope_scaling,
        "rope_theta": config.rope_theta,
        "partial_rotary_factor": config.partial_rotary_factor,
    }
    stand_in = Qwen3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings or 32768,
        rope_parameters=parameters,
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[config.rope_scaling["rope_type"]](stand_in, "cpu")
    return frequencies, float(scale)
