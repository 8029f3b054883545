"""`DFlashModel`: the weights of a DFlash drafter under z-lab's names, and the maths of its layers.

One forward drafts a whole block (arXiv 2602.06036, appendix A.3). Two things meet in each layer's attention:

    context     features of committed tokens: C = RMSNorm(F W_fc), F the target's tapped hidden states side by side.
                The same C goes into the K and V projections of every layer, past its input norm.
    block       the anchor and masks, embedded by the target. All its rows see the whole context and the whole block,
                unless the layer has a window or is causal.

The row at an anchor's distance j predicts the token at that same position; the anchor's own row predicts nothing. In
drafters with `sample_from_anchor` each row predicts the token after it instead.

How K/V are kept and attended to is the caller's: `DFlashLayer` is given a function for it, so that decoding (slots)
and training (one long row of blocks) share the layers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from hf_dcut.drafters import checkpoint
from hf_dcut.drafters.dflash import weights
from hf_dcut.drafters.dflash.config import DFlashConfig
from hf_dcut.drafters.dflash.convolution import DynamicConvolution
from hf_dcut.drafters.dflash.dialects import find
from hf_dcut.drafters.dflash.lookup import Values
from hf_dcut.drafters.dflash.rope import rope_frequencies, rope_table, rotate
from hf_dcut.drafters.dflash.selector import CandidateSelector

__all__ = ["DFlashAttention", "DFlashLayer", "DFlashModel", "rope_frequencies", "rope_table", "rotate"]

# Query, key and value of a block [B, n, heads, head_dim] -> what its queries gather [B, n, heads * head_dim].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class DFlashAttention(nn.Module):
    """The projections of one layer's attention, with normalised and rotated queries and keys.

    Attributes:
        attention_sink_bias: [heads], a score that gathers nothing; None without sinks.
    """

    attention_sink_bias: Tensor | None

    def __init__(self, config: DFlashConfig):
        super().__init__()
        hidden, bias, self.head_dim = config.hidden_size, config.attention_bias, config.head_dim
        width, kv_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, width, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_width, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.value_scale = config.attention_value_scale
        sinks = nn.Parameter(torch.zeros(config.num_attention_heads)) if config.attention_sink_bias else None
        self.register_parameter("attention_sink_bias", sinks)

    def query(self, hidden: Tensor, rope: Tensor) -> Tensor:
        """Returns queries [B, n, heads, head_dim] of `hidden` [B, n, hidden]."""
        return rotate(self.q_norm(self.q_proj(hidden).unflatten(-1, (-1, self.head_dim))), rope)

    def key(self, hidden: Tensor, rope: Tensor) -> Tensor:
        """Returns keys [B, n, kv heads, head_dim] of `hidden` [B, n, hidden]."""
        return rotate(self.k_norm(self.k_proj(hidden).unflatten(-1, (-1, self.head_dim))), rope)

    def value(self, hidden: Tensor) -> Tensor:
        """Returns values [B, n, kv heads, head_dim] of `hidden` [B, n, hidden]."""
        value = self.v_proj(hidden).unflatten(-1, (-1, self.head_dim))
        return value if self.value_scale == 1.0 else value * self.value_scale


class DFlashLayer(nn.Module):
    """One decoder layer, run on blocks. DFlash2 has convolutions around its two halves."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DFlashAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Qwen3MLP(config)
        convolved = config.conv_kernel_size is not None
        self.attention_conv = DynamicConvolution(config) if convolved else None
        self.mlp_conv = DynamicConvolution(config) if convolved else None

    def forward(self, hidden: Tensor, rope: Tensor, attend: Attend, first: int = 0) -> Tensor:
        """Returns the layer's output for rows `first` and on of each block: [B, n - first, hidden].

        Args:
            hidden: [B, n, hidden] of whole blocks: all their rows are keys, also those that are not wanted.
            rope: [2, B, n, 1, rotary dims], from `rope_table`.
            attend: stores the block's K/V, and attends.
            first: 1 in the last layer, where the anchor's own row leads nowhere.
        """
        attention = self.self_attn
        # A convolution reads the rows before those that are wanted, so these are dropped behind it.
        early = first if self.attention_conv is None else 0

        def gather(normed: Tensor) -> Tensor:
            # Contiguous, or a product with three dimensions copies the weight for each block.
            query = attention.query(normed[:, early:].contiguous(), rope[:, :, early:])
            return attention.o_proj(attend(query, attention.key(normed, rope), attention.value(normed)))

        hidden = hidden[:, early:] + _around(self.attention_conv, gather, self.input_layernorm(hidden))
        hidden = hidden + _around(self.mlp_conv, self.mlp, self.post_attention_layernorm(hidden))
        return hidden[:, first - early :]


class DFlashModel(nn.Module):
    """All weights of a drafter. Embeddings and head are the target's, unless the drafter brings its own.

    Args:
        config: its shape.
        own: which tables it brings: of "embed_tokens", "lm_head" and "mask_embedding".

    Attributes:
        d2t: int64 [draft vocabulary], what to add to a draft token to get its token; None for the whole vocabulary.
        mask_embedding: [hidden], what masks are embedded as, instead of their token's row.
    """

    d2t: Tensor | None
    mask_embedding: Tensor | None

    def __init__(self, config: DFlashConfig, own: Collection[str] = ()):
        super().__init__()
        self.config = config
        hidden, size = config.hidden_size, config.draft_vocab_size
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.candidate_selector = None if config.selector_rank is None else CandidateSelector(config)
        self.register_buffer("d2t", None if size is None else torch.zeros(size, dtype=torch.int64))
        vocabulary = _vocabulary(config) if {"embed_tokens", "lm_head"} & set(own) else 0
        self.embed_tokens = nn.Embedding(vocabulary, hidden) if "embed_tokens" in own else None
        self.lm_head = nn.Linear(hidden, size or vocabulary, bias=False) if "lm_head" in own else None
        self.register_parameter(
            "mask_embedding", nn.Parameter(torch.zeros(hidden)) if "mask_embedding" in own else None
        )

    def context(self, taps: Tensor) -> Tensor:
        """Returns the context features C [A, hidden] of tapped hidden states [A, taps * hidden]."""
        return self.hidden_norm(self.fc(taps))

    def draft_ids(self) -> Tensor | None:
        """Returns the token of each draft token, int64 [draft vocabulary]; None for the whole vocabulary."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], dtype: str | torch.dtype = "auto") -> Self:
        """Returns the model saved in `folder`, in any format of `dialects.py`, on the CPU.

        Args:
            folder: holds config.json, and model.safetensors or an index of shards.
            dtype: of the weights; "auto" takes the config's, or that of the file.

        Raises:
            FileNotFoundError: no config or no safetensors weights.
            ValueError: a config that is not supported, or weights that do not fit it.
        """
        folder = Path(folder)
        values = checkpoint.read_config(folder)
        # The config is looked at first: what it is refused for is plainer than what its weights are.
        DFlashConfig.from_dict(values)
        return cls.of(values, checkpoint.read_tensors(folder), dtype, f"the weights in {folder}")

    @classmethod
    def of(
        cls,
        values: Values,
        tensors: Mapping[str, Tensor],
        dtype: str | torch.dtype = "auto",
        where: str = "the weights",
    ) -> Self:
        """Returns the model of these weights, which it keeps where no cast is needed.

        Args:
            values: content of a config.json, in any format of `dialects.py`.
            tensors: weights under that format's names.
            dtype: as for `load`.
            where: what errors call the weights.

        Raises:
            ValueError: a config that is not supported, or weights that do not fit it.
        """
        dialect, config = find(values), DFlashConfig.from_dict(values)
        found = dialect.rename(tensors)
        t2d = weights.take_maps(found, config)
        with torch.device("meta"):
            model = cls(config, weights.own_parts(found))
        faults = weights.shape_faults(_shapes(model.state_dict()), _shapes(found))
        faults += weights.needed_faults(dialect, found)
        faults = faults or weights.draft_vocabulary_faults(config, found.get("d2t"), t2d)
        if faults:
            raise ValueError(f"{where} do not fit their config.json. {'; '.join(faults)}. Download them again")
        if dtype == "auto":
            dtype = config.dtype or found["fc.weight"].dtype
        dtype = checkpoint.parse_dtype(dtype)
        # With `assign` nothing is left of the meta device: there are no buffers but those that are saved.
        cast = {name: t.to(dtype) if t.is_floating_point() else t for name, t in found.items()}
        model.load_state_dict(cast, assign=True)
        return model.eval().requires_grad_(False)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes config.json and model.safetensors in z-lab's format."""
        tensors = dict(self.state_dict())
        ids = self.draft_ids()
        if ids is not None:
            tensors["t2d"] = torch.zeros(_vocabulary(self.config), dtype=torch.bool, device=ids.device).index_fill(
                0, ids, True
            )
        dtype = str(self.fc.weight.dtype).removeprefix("torch.")
        checkpoint.write(Path(folder), replace(self.config, dtype=dtype).to_dict(), tensors)


def _around(convolution: DynamicConvolution | None, sublayer: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Returns what the sublayer makes of the rows, between two convolutions where there are any."""
    return sublayer(rows) if convolution is None else convolution.around(sublayer, rows)


def _vocabulary(config: DFlashConfig) -> int:
    if config.vocab_size is None:
        raise ValueError("config.json vocab_size=None: a drafter with a vocabulary of its own needs it")
    return config.vocab_size


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
