"""`DFlashConfig`: the shape of a DFlash drafter, whichever format it was published in.

The fields are named as z-lab's format names them; `dialects.py` reads them from there and from the other formats.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hf_dcut.drafters.checkpoint import parse_dtype
from hf_dcut.drafters.dflash.dialects import ARCHITECTURE, ARCHITECTURE_2, find, is_dflash
from hf_dcut.drafters.dflash.lookup import Values

__all__ = ["ARCHITECTURE", "DFlashConfig", "is_dflash"]

FULL, SLIDING = "full_attention", "sliding_attention"
# What z-lab's format keeps under `dflash_config`, and leaves out where it is not in use.
_NESTED = (
    *("mask_token_id", "target_layer_ids", "sample_from_anchor"),
    *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    *("attention_sink_bias", "attention_value_scale"),
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
)
# What it says even where it is as usual, so that nobody has to know what is.
_ALWAYS = ("hidden_act", "attention_bias", "rope_scaling", "sliding_window", "layer_types")


@dataclass(frozen=True)
class DFlashConfig:
    """The shape of a DFlash drafter and of the target it belongs to.

    Attributes:
        hidden_size, vocab_size: as the target's; vocab_size is None when the config does not say.
        num_target_layers: decoder layers of the target; None when the config does not say.
        target_layer_ids: decoder layers of the target, from 0, whose output the drafter reads, in this order.
        block_size: rows of a block, the anchor first.
        mask_token_id: token that stands where a draft is wanted.
        draft_vocab_size: tokens that can be drafted; None for the whole vocabulary.
        intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, hidden_act,
            attention_bias, rms_norm_eps, rope_theta, max_position_embeddings, layer_types: the drafter's own
            layers, named as Transformers names them.
        rope_scaling: scaled RoPE under Transformers' names, with its `rope_type`; None for the plain one.
        partial_rotary_factor: part of each head that is rotated, the first dimensions.
        sliding_window: in sliding layers, a row sees keys less than this far from it.
        is_causal: whether a row of the block sees the rows behind it; None for "no, but sliding layers are causal".
        attention_sink_bias: whether each head has a score that takes part in the softmax and gathers nothing.
        attention_value_scale: factor on all values.
        sample_from_anchor: whether rows predict the token after their own position, so that the anchor's row is the
            first draft. Else they predict the one at it, and the anchor's row predicts nothing.
        conv_kernel_size, conv_group_size: of the dynamic convolutions around attention and MLP; None without them.
        selector_rank, selector_top_k: of the selector of candidates; None without it.
        input_embedding_scale: factor on the raw rows of the embedding table; None to call the target's own embedding
            module instead, with all it does.
        output_multiplier, final_logit_softcapping: what is done to logits, in this order.
        dtype: dtype the weights were saved in; None when the config does not say.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int | None
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    rope_theta: float
    rms_norm_eps: float
    num_target_layers: int | None = None
    draft_vocab_size: int | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    max_position_embeddings: int | None = None
    layer_types: tuple[str, ...] | None = None
    rope_scaling: dict[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    sliding_window: int | None = None
    is_causal: bool | None = None
    attention_sink_bias: bool = False
    attention_value_scale: float = 1.0
    sample_from_anchor: bool = False
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    input_embedding_scale: float | None = None
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ValueError(f"block_size={self.block_size}: a block is an anchor and at least one draft, 2 or more")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}: check config.json"
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"head_dim={self.head_dim}, partial_rotary_factor={self.partial_rotary_factor}: rotary embedding needs "
                f"an even number of dimensions up to head_dim, not {self.rotary_dim}"
            )
        self._check_layers()
        self._check_extras()
        if self.dtype is not None:
            parse_dtype(self.dtype)

    @classmethod
    def from_dict(cls, values: Values) -> DFlashConfig:
        """Returns the config that a config.json stands for, in any format that is known.

        Raises:
            ValueError: a format or feature that is not supported, or a value that is missing or makes no sense.
        """
        return cls(**find(values).fields(values))

    def to_dict(self) -> Values:
        """Returns the content of a config.json in z-lab's format."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        nested = {name: values.pop(name) for name in _NESTED if name in values}
        second = self.conv_kernel_size is not None or self.selector_rank is not None
        return {
            "architectures": [ARCHITECTURE_2 if second else ARCHITECTURE],
            "model_type": "qwen3",
            "dflash_config": nested | {"target_layer_ids": list(self.target_layer_ids)},
            **{name: value for name, value in values.items() if name not in _ALWAYS},
            **{name: getattr(self, name) for name in _ALWAYS},
            "layer_types": list(self.layer_types or [FULL] * self.num_hidden_layers),
            "tie_word_embeddings": False,
        }

    @property
    def draft_tokens(self) -> int:
        """Drafts of a block."""
        return self.block_size - 1 + self.sample_from_anchor

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    def sight(self, layer: int) -> tuple[int | None, bool]:
        """Returns what the rows of a block see in a layer: the window (None: everything), and whether it is causal."""
        sliding = self.layer_types is not None and self.layer_types[layer] == SLIDING
        return self.sliding_window if sliding else None, sliding if self.is_causal is None else self.is_causal

    def _check_layers(self) -> None:
        types = self.layer_types or ()
        if self.layer_types is not None and len(types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(types)} entries and num_hidden_layers={self.num_hidden_layers}: "
                "give one type a layer"
            )
        if SLIDING in types and self.sliding_window is None:
            raise ValueError(f"layer_types={list(types)} and sliding_window=None: give the width of the window")

    def _check_extras(self) -> None:
        for first, second in (("conv_kernel_size", "conv_group_size"), ("selector_rank", "selector_top_k")):
            pair = getattr(self, first), getattr(self, second)
            if (pair[0] is None) != (pair[1] is None):
                raise ValueError(f"{first}={pair[0]} and {second}={pair[1]}: give both, or neither")
        if self.conv_group_size is not None and self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of conv_group_size={self.conv_group_size}: "
                "check config.json"
            )
        if self.selector_rank is not None and (self.draft_vocab_size is not None or self.vocab_size is None):
            raise ValueError(
                f"selector_rank={self.selector_rank} with draft_vocab_size={self.draft_vocab_size} and "
                f"vocab_size={self.vocab_size}: a selector knows tokens by their id in the whole vocabulary. Give "
                "vocab_size, and no draft vocabulary"
            )
