"""`BoundDFlash`: a DFlash drafter while it serves one call.

Its only state is the K/V of each draft layer, in slots numbered as the target's. `observe` appends the K/V of committed
tokens at their own cells. `propose` writes those of its block into the cells behind, as scratch: the block is read
together with its context through one slice, and the next `observe` and `propose` overwrite it. A rejected draft
therefore needs nothing undone.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_dcut.cache import LayerShape, SlotLayer
from hf_dcut.drafters.base import BoundDrafter
from hf_dcut.drafters.dflash.attention import BlockAttention
from hf_dcut.drafters.dflash.config import DFlashConfig
from hf_dcut.drafters.dflash.model import DFlashLayer, DFlashModel
from hf_dcut.drafters.dflash.rope import Rope, rotate
from hf_dcut.drafters.dflash.vocabulary import block_embedding, draft_head, likeliest, most_likely
from hf_dcut.drafters.trees import grow
from hf_dcut.types import Batch, Committed, Drafts

# Tokens of a place that compete for a node of a tree.
_CANDIDATES = 4


def layer_shape(config: DFlashConfig) -> LayerShape:
    """Returns what one cell of one draft layer holds."""
    heads, dim = config.num_key_value_heads, config.head_dim
    return LayerShape(heads, dim, heads, dim)


class BoundDFlash(BoundDrafter):
    """A DFlash drafter with the K/V of its requests.

    Args:
        model: the drafter's weights, shared with other calls and never written.
        target: the Transformers model that verifies; its embeddings and head are called, so that scaled embeddings,
            quantised weights and adapters are as in the target itself.
        slots, length: as in `Drafter.bind`.
    """

    capturable = True

    def __init__(self, model: DFlashModel, target: PreTrainedModel, slots: int, length: int):
        self.model, self.config = model, model.config
        weight = model.fc.weight
        self.dtype, self.device = weight.dtype, weight.device
        shape = layer_shape(self.config)
        self.layers = [SlotLayer(shape, slots, length, self.dtype, self.device) for _ in model.layers]
        self.embed, self.head = block_embedding(model, target), draft_head(model, target)
        self.draft_ids = model.draft_ids()
        self.context_kv = ContextKV(model)
        self.rope = Rope(self.config, self.dtype, self.device)
        self.offsets = torch.arange(self.config.block_size, device=self.device)

    def observe(self, committed: Committed) -> None:
        """Appends the K/V of committed rows: all layers' from one matrix product, since they share the context."""
        assert committed.taps is not None, "a DFlash drafter needs the target's tapped hidden states"
        context = self.model.context(committed.taps.to(self.device, self.dtype))
        # A drafter reads text: of an image's positions in time, height and width it takes the first.
        position = committed.position if committed.position.ndim == 1 else committed.position[0]
        keys, values = self.context_kv(context, self.rope(position.to(self.device)))
        slot, cell = committed.slot.to(self.device), committed.cell.to(self.device)
        for layer, key, value in zip(self.layers, keys.unbind(1), values.unbind(1), strict=True):
            layer.store(slot, cell, key, value)

    def propose(self, batch: Batch) -> Drafts:
        """Returns the drafts of a block for each request. Row i of the batch reads slot i, as live requests lie."""
        batch = batch.to(self.device)
        hidden = self._hidden(batch)
        logits, selector = self.head(hidden), self.model.candidate_selector
        if selector is not None:
            return Drafts.chain(*selector.walk(hidden, logits.float().to(self.device), batch.anchor))
        token, confidence = most_likely(logits)
        token = token.to(self.device)
        token = token if self.draft_ids is None else self.draft_ids[token]
        return Drafts.chain(token, confidence.to(self.device))

    def propose_tree(self, batch: Batch, nodes: int) -> Drafts:
        """Returns the likeliest paths through the block as a tree; a chain where places depend on others."""
        if self.model.candidate_selector is not None:
            return self.propose(batch)
        logits, ids = self.propose_logits(batch)
        token, confidence = likeliest(logits, _CANDIDATES)
        return grow(token if ids is None else ids[token], confidence, nodes)

    def propose_logits(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Returns logits [B, D, C] of the drafts and the C token ids they are of; None for the whole vocabulary."""
        if self.model.candidate_selector is not None:
            return super().propose_logits(batch)
        return self._logits(batch.to(self.device)).to(self.device), self.draft_ids

    def _logits(self, batch: Batch) -> Tensor:
        """Returns logits [B, D, C], wherever the head is."""
        return self.head(self._hidden(batch))

    def _hidden(self, batch: Batch) -> Tensor:
        """Returns the hidden states [B, D, hidden] that the drafts are made of."""
        rope = self.rope((batch.length + batch.rope)[:, None] + self.offsets)
        attention = BlockAttention(batch, self.offsets)
        hidden = self.embed(batch.anchor)
        for index, (layer, cache) in enumerate(zip(self.model.layers, self.layers, strict=True)):
            layer = cast(DFlashLayer, layer)
            attend = partial(attention, cache, *self.config.sight(index), layer.self_attn.attention_sink_bias)
            # The anchor's own row leads nowhere in the last layer, unless it is the first draft.
            last = index == len(self.layers) - 1
            hidden = layer(hidden, rope, attend, first=int(last and not self.config.sample_from_anchor))
        return self.model.norm(hidden)

    def move(self, source: int, destination: int) -> None:
        """Moves a request's context to another slot."""
        for layer in self.layers:
            layer.move(source, destination)

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copies the context of a request's first `length` cells to another slot."""
        for layer in self.layers:
            layer.copy(source, destination, length)

    def free(self, slot: int) -> None:
        """Nothing to forget: a new request overwrites its cells before it reads them."""


class ContextKV:
    """The K and V projections of all layers, stacked for the length of a call."""

    def __init__(self, model: DFlashModel):
        attentions = [cast(DFlashLayer, layer).self_attn for layer in model.layers]
        projections = [p for a in attentions for p in (a.k_proj, a.v_proj)]
        self.weight = torch.cat([p.weight for p in projections])
        self.bias = torch.cat([p.bias for p in projections]) if model.config.attention_bias else None
        self.k_norm = torch.stack([a.k_norm.weight for a in attentions])[:, None]
        self.eps, self.value_scale = model.config.rms_norm_eps, model.config.attention_value_scale
        self.shape = (len(attentions), 2, model.config.num_key_value_heads, model.config.head_dim)

    def __call__(self, context: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Returns K and V [A, layers, kv heads, head_dim] of context features [A, hidden].

        Args:
            context: from `DFlashModel.context`.
            rope: [2, A, 1, rotary dims], from `Rope`.
        """
        key, value = F.linear(context, self.weight, self.bias).unflatten(-1, self.shape).unbind(2)
        normed = F.rms_norm(key, key.shape[-1:], eps=self.eps) * self.k_norm
        return rotate(normed, rope[:, :, None]), value * self.value_scale
