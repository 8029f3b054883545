"""The forward of training: many blocks of an answer at once, each as decoding would draft it.

A block at anchor a reads the target's taps at positions below a, strictly, and itself. It must not read the tap at a:
the target computes that one in the step that verifies the block. Blocks do not see each other. With one block of two
rows at anchors 2 and 4, the keys are the context, then the blocks:

                    context 0 1 2 3    block at 2    block at 4
    rows at 2               x x . .       x x           . .
    rows at 4               x x x x       . .           x x
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_dcut.drafters.dflash.bound import target_head
from hf_dcut.drafters.dflash.model import DFlashAttention, DFlashModel, rope_frequencies, rope_table
from hf_dcut.drafters.training.batches import TrainingBatch


class BlockDrafts(nn.Module):
    """A drafter's weights with the frozen embeddings and head of its target.

    Args:
        model: the weights, trained in place.
        target: whose embeddings and head are used; not a submodule, so it is neither trained nor saved.
        dtype: the head multiplies in.
    """

    def __init__(self, model: DFlashModel, target: PreTrainedModel, dtype: torch.dtype):
        super().__init__()
        self.model = model
        weight = model.fc.weight
        self._embed: Callable[[Tensor], Tensor] = target.get_input_embeddings().__call__
        self.head = target_head(target, model.draft_ids(), dtype, weight.device)

    def forward(self, batch: TrainingBatch) -> Tensor:
        """Returns what the head reads, [R, n, D, hidden]: row j of a block is of the token at its anchor + j, from 1."""
        config, (rows, count) = self.model.config, batch.anchor.shape
        dtype, device = self.model.fc.weight.dtype, batch.anchor.device
        offsets = torch.arange(config.block_size, device=device)
        frequencies = rope_frequencies(config, dtype, device)
        context = self.model.context(batch.taps.to(dtype))
        rope = rope_table((batch.anchor.view(-1, 1) + offsets), frequencies, dtype)
        context_rope = rope_table(torch.arange(context.shape[1], device=device), frequencies, dtype)
        mask = block_mask(batch.anchor, context.shape[1], config.block_size)
        hidden = self._blocks(batch.token.flatten()).to(dtype)
        for index, layer in enumerate(self.model.layers):
            attention: DFlashAttention = layer.self_attn
            keys, values = attention.key(context, context_rope), attention.value(context)
            last = index == len(self.model.layers) - 1
            hidden = layer(hidden, rope, partial(attend, keys, values, mask), first=int(last))
        return self.model.norm(hidden).unflatten(0, (rows, count))

    def _blocks(self, anchor: Tensor) -> Tensor:
        """Returns the embeddings [blocks, block, hidden] of each anchor and the masks after it."""
        block = anchor[:, None].repeat(1, self.model.config.block_size)
        block[:, 1:] = self.model.config.mask_token_id
        with torch.no_grad():
            return self._embed(block)


def block_mask(anchor: Tensor, context: int, block: int) -> Tensor:
    """Returns what a row of each block sees, bool [R, n, context + n * block].

    Args:
        anchor: int64 [R, n].
        context: L, positions of the longest context.
        block: rows of a block.
    """
    (rows, count), device = anchor.shape, anchor.device
    before = torch.arange(context, device=device) < anchor[..., None]
    own = torch.eye(count, dtype=torch.bool, device=device).repeat_interleave(block, dim=1)
    return torch.cat((before, own.expand(rows, -1, -1)), dim=-1)


def attend(
    context_key: Tensor, context_value: Tensor, mask: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Returns what the queries of R * n blocks gather, [R * n, q, heads * head_dim].

    Args:
        context_key, context_value: [R, L, kv heads, head_dim].
        mask: from `block_mask`.
        query: [R * n, q, heads, head_dim], rows of each block.
        key, value: [R * n, block, kv heads, head_dim].
    """
    (rows, count), wanted = mask.shape[:2], query.shape[1]
    groups = query.shape[2] // key.shape[2]
    keys = torch.cat((context_key, key.reshape(rows, -1, *key.shape[2:])), dim=1)
    values = torch.cat((context_value, value.reshape(rows, -1, *value.shape[2:])), dim=1)
    keys, values = (x.repeat_interleave(groups, dim=2).transpose(1, 2) for x in (keys, values))
    seen = mask[:, None].repeat_interleave(wanted, dim=2)
    queries = query.reshape(rows, -1, *query.shape[2:]).transpose(1, 2)
    gathered = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen)
    return gathered.transpose(1, 2).reshape(rows * count, wanted, -1)
