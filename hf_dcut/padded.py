"""Left-padded batches as `generate` takes and returns them: prompts out of one, sequences into one."""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from hf_dcut.requests import Request
from hf_dcut.stats import Stats


@dataclass
class DCutOutput(GenerateDecoderOnlyOutput):
    """What `generate(..., dcut=..., return_dict_in_generate=True)` returns.

    Attributes:
        sequences: int64 [B, P + longest], left-padded prompts and new tokens, padded behind.
        scores, logits: a float32 [B, V] a generated token, if asked for by `output_scores`, `output_logits`.
        logprobs: float32 [B, longest], log-probability of each new token under the processed scores that it was chosen
            by, 0 behind the end of a row, so that a row's sum is the text's; if asked for by `output_logprobs`. Equals
            `compute_transition_scores(sequences, scores, normalize_logits=True)`, without keeping all scores.
        finish_reasons: of each row: "eos", "length", or "stop" for a stop string or another criterion.
        stats: what the steps did.
        attentions, hidden_states, cache: always None.
    """

    logprobs: Tensor | None = None
    finish_reasons: list[str | None] | None = None
    stats: Stats | None = None


def prompts_of(input_ids: Tensor, model_kwargs: dict[str, Any], images: bool = False) -> list[list[int]]:
    """Returns the token ids of each row without padding.

    Args:
        input_ids: int64 [B, P].
        model_kwargs: what Transformers prepared for the forward.
        images: whether position_ids [4, B, P] may tell where images lie, behind the positions of the text.

    Raises:
        ValueError: no rows, empty rows, a mask that is not left padding, or positions that do not count from 0.
    """
    rows, width = input_ids.shape
    if not rows or not width:
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)}: give at least one prompt of at least one token"
        )
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
    if mask.shape != input_ids.shape or not ((mask == 0) | (mask == 1)).all():
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}: give zeros and ones in the shape of input_ids, "
            f"{tuple(input_ids.shape)}"
        )
    mask = mask.long()
    if (mask.diff(dim=1) < 0).any() or not mask[:, -1].all():
        raise ValueError(
            "attention_mask is not plain left padding: every row must be zeros, then ones. Set "
            "tokenizer.padding_side='left'"
        )
    positions = model_kwargs.get("position_ids")
    if images and positions is not None and positions.ndim == 3 and len(positions) == 4:
        positions = positions[0]
    if positions is not None and positions.shape[-1] != width:
        # A mask of ones alone arrives as None, but positions were counted from it.
        raise ValueError(
            f"attention_mask or position_ids have shape {tuple(positions.shape)}: give them in the shape of input_ids, "
            f"{tuple(input_ids.shape)}"
        )
    if positions is not None and not torch.equal(positions * mask, ((mask.cumsum(1) - 1) * mask).expand_as(positions)):
        raise ValueError(
            "position_ids that do not count from 0 at each prompt's first token do not work with dcut: leave them out"
        )
    pads = (width - mask.sum(1)).tolist()
    return [row[pad:] for row, pad in zip(input_ids.tolist(), pads, strict=True)]


def pad_of(config: GenerationConfig) -> int:
    """Returns the id rows are padded with; 0 where there is none, since then no row needs padding."""
    return 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)


def wants_logprobs(config: GenerationConfig, asked: object) -> bool:
    """Returns whether log-probabilities are to be kept: what the call says, else the config.

    Raises:
        TypeError, ValueError: neither True nor False; or they are, but a plain tensor is returned.
    """
    wanted = getattr(config, "output_logprobs", None) if asked is None else asked
    if not isinstance(wanted, (bool, NoneType)):
        raise TypeError(f"output_logprobs={wanted!r}: give True or False")
    if wanted and not config.return_dict_in_generate:
        raise ValueError("output_logprobs=True needs an output to hold them: pass return_dict_in_generate=True too")
    return bool(wanted)


def output_of(
    input_ids: Tensor, requests: list[Request], config: GenerationConfig, stats: Stats
) -> DCutOutput | Tensor:
    """Returns the sequences, int64 [B, P + longest], ended rows filled with the pad token; in a dict on request."""
    longest, pad = max(len(request.tokens) for request in requests), pad_of(config)
    new = [request.tokens + [pad] * (longest - len(request.tokens)) for request in requests]
    sequences = torch.cat([input_ids, torch.tensor(new, dtype=input_ids.dtype, device=input_ids.device)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    stats.finish_reasons = [request.finish_reason for request in requests]
    logprobs = [torch.tensor(request.logprobs) for request in requests if request.keeps_logprobs]
    return DCutOutput(
        sequences=sequences,
        scores=_columns([request.scores for request in requests], longest, pad) if config.output_scores else None,
        logits=_columns([request.logits for request in requests], longest, pad) if config.output_logits else None,
        logprobs=pad_sequence(logprobs, batch_first=True).to(input_ids.device) if logprobs else None,
        finish_reasons=stats.finish_reasons,
        stats=stats,
    )


def _columns(kept: list[list[Tensor]], longest: int, pad: int) -> tuple[Tensor, ...]:
    """Returns one float32 [B, V] a generated column, as `generate` does; ended rows are certain of the pad token."""
    certain = torch.full_like(kept[0][0], -torch.inf)
    certain[:, pad] = 0.0
    return tuple(torch.cat([row[k] if k < len(row) else certain for row in kept]) for k in range(longest))
