"""How long requests may be: a model's positions, and where its RoPE changes with length."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


def check_length(model: PreTrainedModel, prompt: int, longest: int) -> None:
    """Raises ValueError when a prompt of so many tokens, or a request of `longest`, is beyond the model's positions."""
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and prompt > limit:
        raise ValueError(
            f"a prompt has {prompt} tokens but the model has {limit} positions: shorten it to at most {limit}"
        )
    original = min(
        (
            int(p["original_max_position_embeddings"])
            for p in _ropes(model)
            if p.get("rope_type") == "longrope" and "original_max_position_embeddings" in p
        ),
        default=None,
    )
    if original is None and "longrope" in rope_types(model):
        original = getattr(config, "original_max_position_embeddings", None)
    if original is not None and longest > original:
        raise ValueError(
            f"requests of up to {longest} tokens go past {original} positions, where this model's longrope rescales "
            f"the whole batch: lower max_new_tokens or shorten the prompts to stay within {original}"
        )


def rope_types(model: PreTrainedModel) -> set[str]:
    """Returns the kinds of RoPE scaling that the model's layers use."""
    return {str(parameters.get("rope_type", "default")) for parameters in _ropes(model)}


def _ropes(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Returns the RoPE parameters of the model: one set, or one for each layer type."""
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [dict(parameters)]
