"""`DFlashModel`: the weights of a DFlash drafter under z-lab's names, and the maths of its layers.

One forward drafts a whole block (arXiv 2602.06036, appendix A.3). Two things meet in each layer's attention:

    context     features of committed tokens: C = RMSNorm(F W_fc), F the target's tapped hidden states side by side.
                The same C goes into the K and V projections of every layer, past its input norm.
    block       the anchor and masks, embedded by the target. All its rows see the whole context and the whole block.

The row at an anchor's distance j predicts the token at that same position; the anchor's own row predicts nothing.

How K/V are kept and attended to is the caller's: `DFlashLayer` is given a function for it, so that decoding (slots)
and training (one long row of blocks) share the layers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from hf_dcut.drafters import checkpoint
from hf_dcut.drafters.dflash.config import DFlashConfig

# Query, key and value of a block [B, n, heads, head_dim] -> what its queries gather [B, n, heads * head_dim].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class DFlashAttention(nn.Module):
    """The projections of one layer's attention, with normalised and rotated queries and keys."""

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

    def query(self, hidden: Tensor, rope: Tensor) -> Tensor:
        """Returns queries [B, n, heads, head_dim] of `hidden` [B, n, hidden]."""
        return rotate(self.q_norm(self.q_proj(hidden).unflatten(-1, (-1, self.head_dim))), rope)

    def key(self, hidden: Tensor, rope: Tensor) -> Tensor:
        """Returns keys [B, n, kv heads, head_dim] of `hidden` [B, n, hidden]."""
        return rotate(self.k_norm(self.k_proj(hidden).unflatten(-1, (-1, self.head_dim))), rope)

    def value(self, hidden: Tensor) -> Tensor:
        """Returns values [B, n, kv heads, head_dim] of `hidden` [B, n, hidden]."""
        return self.v_proj(hidden).unflatten(-1, (-1, self.head_dim))


class DFlashLayer(nn.Module):
    """One decoder layer, run on blocks."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DFlashAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Qwen3MLP(config)

    def forward(self, hidden: Tensor, rope: Tensor, attend: Attend, first: int = 0) -> Tensor:
        """Returns the layer's output for rows `first` and on of each block: [B, n - first, hidden].

        Args:
            hidden: [B, n, hidden] of whole blocks: all their rows are keys, also those that are not wanted.
            rope: [2, B, n, 1, head_dim], from `rope_table`.
            attend: stores the block's K/V, and attends.
            first: 1 in the last layer, where the anchor's own row leads nowhere.
        """
        normed, attention = self.input_layernorm(hidden), self.self_attn
        query = attention.query(normed[:, first:], rope[:, :, first:])
        gathered = attend(query, attention.key(normed, rope), attention.value(normed))
        hidden = hidden[:, first:] + attention.o_proj(gathered)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DFlashModel(nn.Module):
    """All weights of a drafter. Embeddings and head are the target's.

    Attributes:
        d2t: int64 [draft vocabulary], what to add to a draft token to get its token; None for the whole vocabulary.
    """

    d2t: Tensor | None

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        size = config.draft_vocab_size
        self.register_buffer("d2t", None if size is None else torch.zeros(size, dtype=torch.int64))

    def context(self, taps: Tensor) -> Tensor:
        """Returns the context features C [A, hidden] of tapped hidden states [A, taps * hidden]."""
        return self.hidden_norm(self.fc(taps))

    def draft_ids(self) -> Tensor | None:
        """Returns the token of each draft token, int64 [draft vocabulary]; None for the whole vocabulary."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], dtype: str | torch.dtype = "auto") -> Self:
        """Returns the model saved in `folder`, on the CPU.

        Args:
            folder: holds config.json, and model.safetensors or an index of shards.
            dtype: of the weights; "auto" takes the config's, or that of the file.

        Raises:
            FileNotFoundError: no config or no safetensors weights.
            ValueError: a config that is not supported, or weights that do not fit it.
        """
        folder = Path(folder)
        config = DFlashConfig.from_dict(checkpoint.read_config(folder))
        tensors = checkpoint.read_tensors(folder)
        mask = tensors.pop("t2d", None)
        with torch.device("meta"):
            model = cls(config)
        _check_names(model, tensors, folder)
        _check_draft_vocabulary(config, tensors.get("d2t"), mask, folder)
        if dtype == "auto":
            dtype = config.dtype or tensors["fc.weight"].dtype
        dtype = checkpoint.parse_dtype(dtype)
        weights = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        # With `assign` nothing is left of the meta device: there are no buffers but those that are saved.
        model.load_state_dict(weights, assign=True)
        return model.eval().requires_grad_(False)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes config.json and model.safetensors in z-lab's format."""
        tensors = dict(self.state_dict())
        ids = self.draft_ids()
        if ids is not None:
            tensors["t2d"] = torch.zeros(self.config.vocab_size, dtype=torch.bool, device=ids.device).index_fill(
                0, ids, True
            )
        dtype = str(self.fc.weight.dtype).removeprefix("torch.")
        checkpoint.write(Path(folder), replace(self.config, dtype=dtype).to_dict(), tensors)


def rope_frequencies(config: DFlashConfig, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Returns the rotary frequencies [head_dim / 2] in `dtype`, but at least in float32.

    They are computed where they are used: as a buffer of the model they would be rounded by `model.to(bfloat16)`.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.promote_types(dtype, torch.float32), device=device)
    return config.rope_theta ** (exponent / -config.head_dim)


def rope_table(position: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns cosines and sines [2, ..., 1, head_dim] of positions int64 [...], for all heads alike."""
    angle = position[..., None] * frequencies
    angle = torch.cat((angle, angle), dim=-1)[..., None, :]
    return torch.stack((angle.cos(), angle.sin())).to(dtype)


def rotate(heads: Tensor, rope: Tensor) -> Tensor:
    """Returns `heads` [..., heads, head_dim] rotated by their positions (first half of a head against the second)."""
    cosine, sine = rope
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine


def _check_names(model: DFlashModel, tensors: dict[str, Tensor], folder: Path) -> None:
    """Raises ValueError unless the tensors are those of the model, by name and shape."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    shapes = [
        f"{name} is {tuple(tensors[name].shape)}, config.json asks for {shape}"
        for name, shape in wanted.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    faults = {
        "missing": sorted(wanted.keys() - tensors.keys()),
        "unexpected": sorted(tensors.keys() - wanted.keys()),
        "of another shape": shapes,
    }
    found = [f"{what}: {_first(names)}" for what, names in faults.items() if names]
    if found:
        raise ValueError(
            f"the weights in {folder} do not fit their config.json. {'; '.join(found)}. Download them again"
        )


def _first(names: list[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _check_draft_vocabulary(config: DFlashConfig, d2t: Tensor | None, t2d: Tensor | None, folder: Path) -> None:
    """Raises ValueError when draft tokens map outside the vocabulary, or the two maps disagree."""
    if d2t is None:
        if t2d is not None:
            raise ValueError(f"{folder} has t2d but no draft vocabulary: draft_vocab_size and d2t are needed with it")
        return
    if d2t.is_floating_point():
        raise ValueError(f"d2t in {folder} is {d2t.dtype}: offsets are integers")
    ids = d2t.long() + torch.arange(len(d2t))
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= config.vocab_size:
        raise ValueError(
            f"d2t in {folder} maps drafts to tokens {low} to {high}, vocab_size={config.vocab_size}: d2t holds offsets "
            "(token = draft + d2t[draft]) into the target's vocabulary"
        )
    mask = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    if t2d is not None and not torch.equal(mask, t2d.bool()):
        raise ValueError(f"t2d and d2t in {folder} name different tokens: they come from different drafters")
