"""Targets of which every other layer is a Gated DeltaNet: a recurrent state and a convolution instead of cells."""

from __future__ import annotations

from typing import Any

from target_cases import EXPERTS, FULL, Case
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig

DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", FULL, "linear_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
# Stock layers keep float32 inside norms and the delta rule, whatever the model's dtype.
ROUNDED = 1e-4

ASKED = EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16}

RECURRENT = [
    Case(
        "Qwen3.5",
        Qwen3_5TextConfig,
        DELTA,
        models="Qwen3.5-27B",
        has="Gated DeltaNet",
        attentions=("sdpa",),
        apart=ROUNDED,
    ),
    Case(
        "Qwen3.5-MoE",
        Qwen3_5MoeTextConfig,
        DELTA | ASKED,
        models="Qwen3.5-35B-A3B",
        has="Gated DeltaNet",
        attentions=("sdpa",),
        apart=ROUNDED,
    ),
    Case(
        "Qwen3-Next",
        Qwen3NextConfig,
        DELTA | ASKED,
        models="Qwen3-Next-80B-A3B",
        has="Gated DeltaNet",
        attentions=("sdpa",),
        apart=ROUNDED,
    ),
]
