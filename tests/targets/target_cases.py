"""What a row of the table of targets is, and the sizes that all tiny targets share.

An architecture is a `Case` in a list beside this file (`dense_targets.py`, `expert_targets.py`, ...), or a `Refusal` in
`refused_targets.py`; `target_table.py` joins them. The tests run every case, and write docs/targets.md from the table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel

YES, UNTESTED = "yes", "not tested"
FULL, SLIDING = "full_attention", "sliding_attention"
# Shorter than the prompts and the texts of the tests.
WINDOW = 6

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    # Weights this large keep greedy text from settling into a loop.
    "initializer_range": 0.5,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# What configs of the same kinds of experts call them.
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Latent attention: K/V are kept as one latent and one rotated key that all heads share.
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}


@dataclass(frozen=True)
class Case:
    """An architecture whose text under dcut is its own.

    Attributes:
        name: as people call it.
        config: its class of config; the row's second column is the config's `model_type`.
        fields: what differs from SIZES.
        without: fields of SIZES that its config does not take.
        models: some that have this architecture.
        has: what is special about its attention or layers.
        dtype: that the stock model runs in; float64 where it can.
        attentions: of the stock model that it is compared with.
        taps: whether a DFlash drafter can read its layers; else prompt lookup stands in.
        sampled: whether sampled text is compared too.
        tensor_parallel: `YES`, `UNTESTED`, or why not.
        apart: how far logits may lie apart, of the largest; None for what its dtype and attention allow.
    """

    name: str
    config: type[PreTrainedConfig]
    fields: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    models: str = ""
    has: str = ""
    dtype: torch.dtype = torch.float64
    attentions: tuple[str, ...] = ("sdpa", "eager")
    taps: bool = True
    sampled: str = YES
    tensor_parallel: str = UNTESTED
    apart: float | None = None

    def build(self, attention: str | None = None, **fields: Any) -> PreTrainedModel:
        """Returns a random model, the same for the same arguments; its experts run in any dtype."""
        values = {name: value for name, value in SIZES.items() if name not in self.without}
        return build(self.config(**(values | self.fields | fields)), self.dtype, attention or self.attentions[0])


@dataclass(frozen=True)
class Refusal:
    """An architecture that is refused when it is first used.

    Attributes:
        name, config, fields, without, models: as of a `Case`.
        reason: what the table says.
        told: a pattern of what the error says.
    """

    name: str
    config: type[PreTrainedConfig]
    reason: str
    told: str
    fields: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = tuple(SIZES)
    models: str = ""

    def build(self) -> PreTrainedModel:
        """Returns a random model in float32."""
        values = {name: value for name, value in SIZES.items() if name not in self.without}
        return build(self.config(**(values | self.fields)), torch.float32)


def build(config: PreTrainedConfig, dtype: torch.dtype, attention: str | None = None) -> PreTrainedModel:
    """Returns a random model of the config; torch's global generator is left alone."""
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind.from_config(config, dtype=dtype, attn_implementation=attention).eval()
    if getattr(config, "_experts_implementation", None) is not None:
        # The grouped product has no float64.
        model.set_experts_implementation("eager")
    # Random decays forget within a token or two; these make some heads of a recurrent layer remember.
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data = torch.linspace(-5, 0, len(parameter), dtype=dtype)
    return model
