"""`BoundDFlash`: a DFlash drafter while it serves one call.

Its only state is the K/V of each draft layer, in slots numbered as the target's. `observe` appends the K/V of committed
tokens at their own cells. `propose` writes those of its block into the cells behind, as scratch: the block is read
together with its context through one slice, and the next `observe` and `propose` overwrite it. A rejected draft
therefore needs nothing undone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_dcut.cache import LayerShape, SlotLayer
from hf_dcut.drafters.base import BoundDrafter
from hf_dcut.drafters.dflash.config import DFlashConfig
from hf_dcut.drafters.dflash.model import DFlashLayer, DFlashModel, rope_frequencies, rope_table, rotate
from hf_dcut.types import Batch, Committed, Drafts


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

    def __init__(self, model: DFlashModel, target: PreTrainedModel, slots: int, length: int):
        self.model, self.config = model, model.config
        weight = model.fc.weight
        self.dtype, self.device = weight.dtype, weight.device
        shape = layer_shape(self.config)
        self.layers = [SlotLayer(shape, slots, length, self.dtype, self.device) for _ in model.layers]
        self.embed = target.get_input_embeddings()
        self.draft_ids = model.draft_ids()
        self.head = target_head(target, self.draft_ids, self.dtype, self.device)
        self.context_kv = ContextKV(model)
        self.frequencies = rope_frequencies(self.config, self.dtype, self.device)
        self.offsets = torch.arange(self.config.block_size, device=self.device)

    def observe(self, committed: Committed) -> None:
        """Appends the K/V of committed rows: all layers' from one matrix product, since they share the context."""
        assert committed.taps is not None, "a DFlash drafter needs the target's tapped hidden states"
        context = self.model.context(committed.taps.to(self.device, self.dtype))
        rope = rope_table(committed.position.to(self.device), self.frequencies, self.dtype)
        keys, values = self.context_kv(context, rope)
        slot, cell = committed.slot.to(self.device), committed.cell.to(self.device)
        for layer, key, value in zip(self.layers, keys.unbind(1), values.unbind(1), strict=True):
            layer.store(slot, cell, key, value)

    def propose(self, batch: Batch) -> Drafts:
        """Returns block_size - 1 drafts a request. Row i of the batch reads slot i, as live requests lie."""
        token, confidence = most_likely(self._logits(batch))
        token = token.to(self.device)
        token = token if self.draft_ids is None else self.draft_ids[token]
        return Drafts.chain(token, confidence.to(self.device))

    def propose_logits(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Returns logits [B, block_size - 1, C] and the C token ids they are of; None for the whole vocabulary."""
        return self._logits(batch).to(self.device), self.draft_ids

    def _logits(self, batch: Batch) -> Tensor:
        """Returns the block's logits [B, block_size - 1, C]; the anchor's place predicts nothing."""
        batch = batch.to(self.device)
        position = (batch.length + batch.rope)[:, None] + self.offsets
        rope = rope_table(position, self.frequencies, self.dtype)
        attention = BlockAttention(batch, self.offsets)
        hidden = self._embed_blocks(batch.anchor)
        for index, (layer, cache) in enumerate(zip(self.model.layers, self.layers, strict=True)):
            last = index == len(self.layers) - 1
            hidden = layer(hidden, rope, partial(attention, cache), first=int(last))
        return self.head(self.model.norm(hidden))

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

    def _embed_blocks(self, anchor: Tensor) -> Tensor:
        """Returns the embeddings [B, block, hidden] of each anchor and the masks after it."""
        block = anchor[:, None].repeat(1, self.config.block_size)
        block[:, 1:] = self.config.mask_token_id
        return self.embed(block).to(self.device, self.dtype)


class BlockAttention:
    """Attention of the blocks of one step to their requests' context and to themselves.

    Args:
        batch: the requests, on the drafter's device.
        offsets: int64 [block], 0 .. block - 1.
    """

    def __init__(self, batch: Batch, offsets: Tensor):
        block, self.rows = len(offsets), len(batch)
        self.slot = batch.slot[:, None].expand(-1, block).flatten()
        self.cell = (batch.length[:, None] + offsets).flatten()
        # The one host read of a draft: how far the slice of cells must go.
        self.reach = int(batch.length.max()) + block
        seen = torch.arange(self.reach, device=offsets.device) < (batch.length + block)[:, None]
        self.mask = seen[:, None, None] if self.rows > 1 else None

    def __call__(self, cache: SlotLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Stores the block's K/V [B, block, kv heads, dim] and returns what `query` gathers, [B, n, heads * dim].

        Args:
            cache: K/V of the layer.
            query: [B, n, heads, dim].
            key, value: of all rows of the block.
        """
        cache.store(self.slot, self.cell, key.flatten(0, 1), value.flatten(0, 1))
        keys, values = cache.view(self.rows, self.reach)
        # All rows of a block see the same cells, so the query heads that share a K/V head are just more rows of it:
        # no K/V is repeated, and every SDPA backend can do it.
        rows, groups = query.shape[1], query.shape[2] // keys.shape[1]
        folded = query.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        gathered = F.scaled_dot_product_attention(folded, keys, values, attn_mask=self.mask)
        return gathered.unflatten(2, (groups, rows)).permute(0, 3, 1, 2, 4).flatten(2)


class ContextKV:
    """The K and V projections of all layers, stacked for the length of a call."""

    def __init__(self, model: DFlashModel):
        attentions = [cast(DFlashLayer, layer).self_attn for layer in model.layers]
        projections = [p for a in attentions for p in (a.k_proj, a.v_proj)]
        self.weight = torch.cat([p.weight for p in projections])
        self.bias = torch.cat([p.bias for p in projections]) if model.config.attention_bias else None
        self.k_norm = torch.stack([a.k_norm.weight for a in attentions])[:, None]
        self.eps = model.config.rms_norm_eps
        self.shape = (len(attentions), 2, model.config.num_key_value_heads, model.config.head_dim)

    def __call__(self, context: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Returns K and V [A, layers, kv heads, head_dim] of context features [A, hidden].

        Args:
            context: from `DFlashModel.context`.
            rope: [2, A, 1, head_dim], from `rope_table`.
        """
        key, value = F.linear(context, self.weight, self.bias).unflatten(-1, self.shape).unbind(2)
        normed = F.rms_norm(key, key.shape[-1:], eps=self.eps) * self.k_norm
        return rotate(normed, rope[:, :, None]), value


def target_head(
    target: PreTrainedModel, draft_ids: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """Returns a function from hidden states [..., hidden] to logits over the drafter's vocabulary.

    With a draft vocabulary, those rows of a plain head are copied once per call, and the rest is never computed. A head
    that is quantised, sharded, adapted or offloaded is asked for all logits instead.
    """
    head = target.get_output_embeddings()
    plain = _is_plain(head)
    if draft_ids is None or not plain:
        expected = head.weight.dtype if plain else target.dtype
        return lambda hidden: _restrict(head(hidden.to(expected)), draft_ids)
    rows = draft_ids.to(head.weight.device)
    weight = head.weight[rows].to(device, dtype)
    bias = None if head.bias is None else head.bias[rows].to(device, dtype)
    return lambda hidden: F.linear(hidden, weight, bias)


def most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the likeliest entry int64 [...] of `logits` [..., V] and its probability at temperature 1, float32."""
    logits = logits.float()
    best, index = logits.max(dim=-1)
    return index, (best - logits.logsumexp(dim=-1)).exp()


def _restrict(logits: Tensor, draft_ids: Tensor | None) -> Tensor:
    return logits if draft_ids is None else logits.index_select(-1, draft_ids.to(logits.device))


def _is_plain(head: nn.Module) -> bool:
    """Returns whether each row of the head's weight gives one token's logit, with nothing done before or after."""
    if type(head) is not nn.Linear or type(head.weight) not in (Tensor, nn.Parameter):
        return False
    # Tensor parallelism and offloading replace the forward of the one module, and may leave it a part of its weight.
    changed = "forward" in vars(head) or head._forward_hooks or head._forward_pre_hooks
    floats = head.weight.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return floats and not changed
