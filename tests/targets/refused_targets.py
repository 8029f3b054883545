"""Architectures that are refused by name when they are first used."""

from __future__ import annotations

from target_cases import Refusal
from transformers import (
    BloomConfig,
    FalconConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MptConfig,
    T5Config,
)

ROPE = {"rope_theta": 10000.0}

REFUSED = [
    Refusal(
        "Llama 4",
        Llama4TextConfig,
        "chunked attention",
        "layers of type chunked_attention",
        {"intermediate_size_mlp": 48, "num_local_experts": 2},
        without=(),
        models="Llama-4-Scout",
    ),
    Refusal(
        "any, with dynamic RoPE",
        LlamaConfig,
        "dynamic RoPE scales by the longest row of a batch",
        "dynamic RoPE",
        {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 2.0}},
        without=(),
    ),
    Refusal(
        "BLOOM",
        BloomConfig,
        "ALiBi: its attention builds positions from its mask",
        "cannot run packed rows",
        {"vocab_size": 101, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        models="bloom-7b1",
    ),
    Refusal(
        "MPT",
        MptConfig,
        "ALiBi: its attention does not use Transformers' interface",
        "cannot run packed rows",
        {"vocab_size": 101, "d_model": 32, "n_layers": 2, "n_heads": 4},
        models="mpt-7b",
    ),
    Refusal(
        "Falcon",
        FalconConfig,
        "its attention does not use Transformers' interface",
        "cannot run packed rows",
        {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        models="falcon-7b",
    ),
    Refusal(
        "Mamba",
        MambaConfig,
        "a recurrent state, which rejected drafts cannot be taken out of",
        "recurrent state",
        {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        models="mamba-130m",
    ),
    Refusal(
        "T5",
        T5Config,
        "encoder and decoder",
        "encoder-decoder",
        {"vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        models="t5-small",
    ),
]
