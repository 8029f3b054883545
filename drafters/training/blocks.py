"""The forward of training: many blocks of an answer at once, each as decoding would draft it.

A block at anchor a reads the target's taps at positions below a, strictly, and itself. It must not read the tap at a:
the target computes that one in the step that verifies the block. Blocks do not see each other. With one block of two
rows at anchors 2 and 4, the keys are the context, then the blocks:

                    context 0 1 2 3    block at 2    block at 4
    rows at 2               x x . .       x x           . .
    rows at 4               x x x x       . .           x x
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from hf_dcut.drafters.dflash.model import DFlashLayer, DFlashModel
from hf_dcut.drafters.dflash.rope import Rope
from hf_dcut.drafters.dflash.vocabulary import block_embedding, refine, target_head
from hf_dcut.drafters.training.batches import TrainingBatch


class BlockDrafts(nn.Module):
    """A drafter's weights with the frozen embeddings and head of its target.

    Args:
        model: the weights, trained in place.
        target: whose embeddings and head are used; not a submodule, so it is neither trained nor saved.
        dtype: everything is computed in: what the drafter will be saved in. Weights keep their own and are cast.
    """

    def __init__(self, model: DFlashModel, target: PreTrainedModel, dtype: torch.dtype):
        super().__init__()
        self.model = model
        self.dtype, weight = dtype, model.fc.weight
        self._embed = block_embedding(model, target)
        head = target_head(target, model.draft_ids(), dtype, weight.device)
        self.target_head = head
        self.head = lambda hidden: refine(head(hidden), model.config)

    def hidden(self, batch: TrainingBatch) -> Tensor:
        """Returns what the head reads, [R, n, D, hidden]: row j, from 1, is of the token at its anchor + j."""
        weights = {name: weight.to(self.dtype) for name, weight in self.named_parameters()}
        return functional_call(self, weights, (batch,))

    def forward(self, batch: TrainingBatch) -> Tensor:
        """Returns the same, computed in the weights' dtype."""
        config, dtype, device = self.model.config, self.model.fc.weight.dtype, batch.anchor.device
        table = Rope(config, dtype, device)
        context = self.model.context(batch.taps.to(dtype))
        rope = table(batch.anchor.view(-1, 1) + torch.arange(config.block_size, device=device))
        context_rope = table(torch.arange(context.shape[1], device=device))
        bias = context_bias(batch.anchor, context.shape[1], dtype)
        with torch.no_grad():
            hidden = self._embed(batch.token.flatten()).to(dtype)
        for index, layer in enumerate(self.model.layers):
            attention = cast(DFlashLayer, layer).self_attn
            kept = attention.key(context, context_rope), attention.value(context)
            last = index == len(self.model.layers) - 1
            hidden = layer(hidden, rope, partial(attend, kept, bias), first=int(last))
        return self.model.norm(hidden).unflatten(0, batch.anchor.shape)


def context_bias(anchor: Tensor, context: int, dtype: torch.dtype) -> Tensor:
    """Returns what is added to a block's scores, [R, n, context]: 0 for positions below its anchor, -inf from it on.

    Args:
        anchor: int64 [R, n].
        context: L, positions of the longest context.
        dtype: of the scores.
    """
    before = torch.arange(context, device=anchor.device) < anchor[..., None]
    return torch.zeros(before.shape, dtype=dtype, device=anchor.device).masked_fill(~before, float("-inf"))


def attend(context: tuple[Tensor, Tensor], bias: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns what the queries of R * n blocks gather, [R * n, q, heads * head_dim].

    Two products, with the context and with the own block, and one softmax over both: a mask over all keys would compute
    what blocks never see of each other.

    Args:
        context: key and value [R, L, kv heads, head_dim].
        bias: from `context_bias`.
        query: [R * n, q, heads, head_dim], rows of each block.
        key, value: [R * n, block, kv heads, head_dim].
    """
    rows, count, length = bias.shape
    groups = query.shape[2] // key.shape[2]
    # R, heads, n, rows of a block, head_dim; the context has no n.
    query = query.unflatten(0, (rows, count)).permute(0, 3, 1, 2, 4) * query.shape[-1] ** -0.5
    key, value = (
        x.unflatten(0, (rows, count)).permute(0, 3, 1, 2, 4).repeat_interleave(groups, 1) for x in (key, value)
    )
    far_key, far_value = (x.transpose(1, 2).repeat_interleave(groups, 1) for x in context)
    far = (query.flatten(2, 3) @ far_key.transpose(-1, -2)).unflatten(2, (count, -1)) + bias[:, None, :, None]
    near = query @ key.transpose(-1, -2)
    share = torch.cat((far, near), dim=-1).softmax(-1).to(value.dtype)
    gathered = (share[..., :length].flatten(2, 3) @ far_value).unflatten(2, (count, -1))
    gathered = gathered + share[..., length:] @ value
    return gathered.permute(0, 2, 3, 1, 4).flatten(0, 1).flatten(2)
