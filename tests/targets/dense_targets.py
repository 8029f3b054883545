"""Dense architectures: every token through the same matrices, K/V of full or sliding attention."""

from __future__ import annotations

from target_cases import FULL, LATENT, SLIDING, WINDOW, YES, Case
from transformers import (
    ApertusConfig,
    Cohere2Config,
    CohereConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    MiniCPM3Config,
    MinistralConfig,
    MistralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

ROPE = {"rope_theta": 10000.0}
LLAMA3 = ROPE | {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = ROPE | {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
LONG = ROPE | {"rope_type": "longrope", "factor": 8.0, "short_factor": [1.5] * 4, "long_factor": [4.0] * 4}
MIXED = {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL, SLIDING]}
SHARED = {
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 101,
    "num_kv_shared_layers": 2,
}

DENSE = [
    Case(
        "Llama 2, Llama 3",
        LlamaConfig,
        models="Llama-3-8B, SmolLM2, Yi, DeepSeek-R1-Distill-Llama",
        tensor_parallel=YES,
    ),
    Case("Llama 3.1", LlamaConfig, {"rope_parameters": LLAMA3}, models="Llama-3.1-8B, 3.2, 3.3", has="RoPE scaling"),
    Case("Llama with YaRN", LlamaConfig, {"rope_parameters": YARN}, has="RoPE scaling"),
    Case("Qwen2.5", Qwen2Config, models="Qwen2.5-7B, Qwen2-7B", has="biases of Q, K and V"),
    Case(
        "Qwen2 with a window",
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        has="sliding layers above full ones",
    ),
    Case("Qwen3", Qwen3Config, models="Qwen3-4B, Qwen3-8B", has="norms of Q and K", tensor_parallel=YES),
    Case(
        "SmolLM3",
        SmolLM3Config,
        {"no_rope_layers": [1, 0, 1], "no_rope_layer_interval": 2},
        models="SmolLM3-3B",
        has="layers without positions",
    ),
    Case(
        "Mistral",
        MistralConfig,
        {"sliding_window": WINDOW},
        models="Mistral-7B-v0.1, Ministral-8B",
        has="a window on every layer",
    ),
    Case("Ministral", MinistralConfig, MIXED, has="windows on some layers"),
    Case("Gemma", GemmaConfig, models="gemma-7b", has="embeddings scaled"),
    Case(
        "Gemma 2",
        Gemma2Config,
        MIXED | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0},
        models="gemma-2-2b, 9b, 27b",
        has="soft caps of scores and logits, alternating windows",
        attentions=("eager",),
    ),
    Case(
        "Gemma 3, text",
        Gemma3TextConfig,
        MIXED | {"query_pre_attn_scalar": 8},
        models="gemma-3-1b",
        has="alternating windows with a RoPE of their own",
    ),
    Case(
        "Gemma 3n, text",
        Gemma3nTextConfig,
        SHARED
        | {
            "initializer_range": 0.2,
            "activation_sparsity_pattern": [0.0] * 4,
            "laurel_rank": 8,
            "num_attention_heads": 4,
        },
        models="gemma-3n-E2B",
        has="layers that attend over the K/V of earlier ones; their output is not one vector a token",
        taps=False,
    ),
    Case(
        "Gemma 4, text",
        Gemma4TextConfig,
        MIXED
        | {
            "layer_types": [SLIDING, SLIDING, FULL],
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        },
        models="gemma-4-31B",
        has="alternating windows, wider heads in full layers",
    ),
    Case(
        "Gemma 4, text, shared K/V",
        Gemma4TextConfig,
        SHARED | {"global_head_dim": 16},
        models="gemma-4-E2B",
        has="layers that attend over the K/V of earlier ones",
    ),
    Case("Phi", PhiConfig, models="phi-2", has="partial RoPE, attention beside the MLP"),
    Case("Phi-3", Phi3Config, {"sliding_window": WINDOW}, models="Phi-3-mini, Phi-4", has="a window on every layer"),
    Case(
        "Phi-3 with longrope",
        Phi3Config,
        {"rope_parameters": LONG, "original_max_position_embeddings": 512, "max_position_embeddings": 4096},
        models="Phi-3-mini-128k, Phi-4-mini",
        has="longrope; up to its original length",
    ),
    Case("OLMo", OlmoConfig, models="OLMo-1B"),
    Case("OLMo 2", Olmo2Config, models="OLMo-2-7B", has="norms behind the layers"),
    Case("OLMo 3", Olmo3Config, MIXED, models="Olmo-3-7B", has="alternating windows"),
    Case(
        "Granite",
        GraniteConfig,
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2, "logits_scaling": 0.5},
        models="granite-3.3-8b",
        has="multipliers of embeddings, residuals, scores and logits",
    ),
    Case("Cohere", CohereConfig, {"logit_scale": 2.0}, models="Command R", has="logits scaled"),
    Case(
        "Cohere 2", Cohere2Config, MIXED | {"logit_scale": 2.0}, models="Command A", has="full layers without positions"
    ),
    Case("GLM-4", Glm4Config, models="GLM-4-9B-0414"),
    Case("Nemotron", NemotronConfig, models="Minitron-4B"),
    Case("Seed-OSS", SeedOssConfig, models="Seed-OSS-36B"),
    Case("StableLM", StableLmConfig, models="stablelm-2-1_6b", has="partial RoPE"),
    Case(
        "StarCoder2",
        Starcoder2Config,
        {"sliding_window": WINDOW},
        models="starcoder2-7b",
        has="a window on every layer",
    ),
    Case("EXAONE 4", Exaone4Config, MIXED, models="EXAONE-4.0-32B", has="full layers without positions"),
    Case("ERNIE 4.5", Ernie4_5Config, models="ERNIE-4.5-0.3B"),
    Case("Hunyuan", HunYuanDenseV1Config, models="Hunyuan-7B"),
    Case("Apertus", ApertusConfig, models="Apertus-8B"),
    Case("MiniCPM3", MiniCPM3Config, LATENT, models="MiniCPM3-4B", has="latent attention"),
    Case("GPT-NeoX", GPTNeoXConfig, models="Pythia", has="partial RoPE"),
    Case("OPT", OPTConfig, {"ffn_dim": 48}, models="opt-1.3b", has="learned positions"),
    Case(
        "GPT-2",
        GPT2Config,
        {"n_embd": 32, "n_layer": 3, "n_head": 4},
        without=("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        models="gpt2",
        has="learned positions",
        taps=False,
    ),
]
