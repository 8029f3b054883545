"""A drafter's way into the vocabulary and out of it: embeddings and head, its own or borrowed from the target.

What is borrowed is looked up at every call, since the target's weights may have changed in between.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_dcut.drafters.dflash.config import DFlashConfig
from hf_dcut.drafters.dflash.model import DFlashModel
from hf_dcut.kernels import argmax_logprob
from hf_dcut.prepacking import has_own_forward, is_linear, packed_linear, packs

Function = Callable[[Tensor], Tensor]


def block_embedding(model: DFlashModel, target: PreTrainedModel) -> Function:
    """Returns a function from anchors int64 [B] to the embeddings [B, block, hidden] of each and the masks after it."""
    config, weight = model.config, model.fc.weight
    embed, mask, scale = _embedding(model, target), model.mask_embedding, config.input_embedding_scale

    def blocks(anchor: Tensor) -> Tensor:
        block = anchor[:, None].repeat(1, config.block_size)
        block[:, 1:] = config.mask_token_id
        embedded = embed(block).to(weight.device, weight.dtype)
        if mask is not None:
            embedded[:, 1:] = mask
        return embedded if scale in (None, 1.0) else embedded * scale

    return blocks


def draft_head(model: DFlashModel, target: PreTrainedModel) -> Function:
    """Returns a function from hidden states [..., hidden] to logits over the drafter's vocabulary."""
    weight = model.fc.weight
    head: Function | None = model.lm_head
    if head is None:
        head = target_head(target, model.draft_ids(), weight.dtype, weight.device)
    return lambda hidden: refine(head(hidden), model.config)


def refine(logits: Tensor, config: DFlashConfig) -> Tensor:
    """Returns logits, multiplied and soft-capped as the drafter was trained with."""
    if config.output_multiplier != 1.0:
        logits = logits * config.output_multiplier
    cap = config.final_logit_softcapping
    return logits if cap is None else (logits / cap).tanh() * cap


def target_head(
    target: PreTrainedModel, draft_ids: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Function:
    """Returns a function from hidden states [..., hidden] to the target's logits over the drafter's vocabulary.

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
    return packed_linear(weight, bias) if packs(weight) else lambda hidden: F.linear(hidden, weight, bias)


def most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the likeliest entry int64 [...] of `logits` [..., V] and its probability at temperature 1, float32."""
    index, logprob = argmax_logprob(logits)
    return index, logprob.exp()


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` likeliest entries int64 [..., C] of `logits` [..., V] and their probabilities, float32."""
    logits = logits.float()
    best, index = logits.topk(min(count, logits.shape[-1]))
    return index, (best - logits.logsumexp(dim=-1, keepdim=True)).exp().clamp_max(1.0)


def raw_table(target: PreTrainedModel) -> Tensor | None:
    """Returns the target's embedding table [rows, hidden]; None where it is no plain table of numbers."""
    table = getattr(target.get_input_embeddings(), "weight", None)
    if not isinstance(table, Tensor) or type(table) not in (Tensor, nn.Parameter):
        return None
    return table if table.ndim == 2 and table.is_floating_point() else None


def gives_raw_rows(target: PreTrainedModel) -> bool:
    """Returns whether the rows of the target's embedding table can be had: from the table, or as the module gives them.

    The module of a target that is split over processes gathers them, unless it does more.
    """
    return raw_table(target) is not None or type(target.get_input_embeddings()) is nn.Embedding


def _embedding(model: DFlashModel, target: PreTrainedModel) -> Function:
    """Returns the embedding of tokens: the drafter's own, the raw rows of the target's, or the target's module."""
    if model.embed_tokens is not None:
        return model.embed_tokens
    table = None if model.config.input_embedding_scale is None else raw_table(target)
    return target.get_input_embeddings() if table is None else lambda tokens: F.embedding(tokens, table)


def _restrict(logits: Tensor, draft_ids: Tensor | None) -> Tensor:
    return logits if draft_ids is None else logits.index_select(-1, draft_ids.to(logits.device))


def _is_plain(head: nn.Module) -> bool:
    """Returns whether each row of the head's weight gives one token's logit, with nothing done before or after."""
    if not is_linear(head):
        return False
    # Tensor parallelism and offloading replace the forward of the one module, and may leave it a part of its weight.
    changed = has_own_forward(head) or head._forward_hooks or head._forward_pre_hooks
    floats = head.weight.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return floats and not changed
