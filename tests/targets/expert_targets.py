"""Mixtures of experts. In float64, experts run one by one (`set_experts_implementation("eager")`)."""

from __future__ import annotations

from target_cases import EXPERTS, FULL, LATENT, SLIDING, WINDOW, Case
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    HYV3Config,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

ROUTED = EXPERTS | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}

EXPERT = [
    Case("Qwen3-MoE", Qwen3MoeConfig, EXPERTS | {"num_experts": 4, "initializer_range": 0.8}, models="Qwen3-30B-A3B"),
    Case(
        "Qwen2-MoE",
        Qwen2MoeConfig,
        EXPERTS
        | {
            "num_experts": 4,
            "shared_expert_intermediate_size": 24,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
        models="Qwen1.5-MoE-A2.7B",
        has="windows that only its masks know",
    ),
    Case(
        "GPT-OSS",
        GptOssConfig,
        EXPERTS | {"num_local_experts": 4, "sliding_window": WINDOW, "layer_types": [SLIDING, FULL, SLIDING]},
        models="gpt-oss-20b, 120b",
        has="sinks, alternating windows",
        attentions=("eager",),
    ),
    Case(
        "Hy3",
        HYV3Config,
        EXPERTS | {"num_experts": 4, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        models="Hy3-295B-A21B",
        has="norms of Q and K, a shared expert",
    ),
    Case("GLM-4-MoE", Glm4MoeConfig, ROUTED | {"n_shared_experts": 1}, models="GLM-4.5, GLM-4.6", has="partial RoPE"),
    Case("DeepSeek-V3", DeepseekV3Config, ROUTED | LATENT, models="DeepSeek-V3, DeepSeek-R1", has="latent attention"),
    Case(
        "Mixtral",
        MixtralConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
        models="Mixtral-8x7B",
        has="a window on every layer",
    ),
    Case(
        "OLMoE",
        OlmoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2},
        models="OLMoE-1B-7B",
    ),
    Case(
        "Phi-3.5-MoE",
        PhimoeConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
        models="Phi-3.5-MoE",
        has="windows that only its masks know",
    ),
]
