"""PEFT adapters on a target: which of them packed rows can run with, and what tells them apart.

An adapter inside the model's layers (LoRA and its kin) acts on each token by itself, so nothing need be known of it.
PEFT is not imported: where a model has adapters it is loaded.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def unwrapped(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the model in whose layers the adapters of a `PeftModel` lie; a model that is none as it is.

    Raises:
        ValueError: the adapter lies in front of the model instead.
    """
    if not _is_peft(model):
        return model
    _refuse(model, model.active_peft_config)
    return model.get_base_model()


def check_adapters(model: PreTrainedModel) -> None:
    """Raises ValueError for an adapter that looks at more than a token, or is applied outside of the layers."""
    # A `PeftModel` puts its own preparation of inputs in the place of the model's while it generates.
    owner: Any = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    outer = [owner.active_peft_config] if _is_peft(owner) else []
    for config in (*outer, *getattr(model, "peft_config", {}).values()):
        _refuse(model, config)


def adapters_of(model: PreTrainedModel) -> list[str]:
    """Returns name, kind and rank of each adapter in the model's layers, active or not."""
    configs = getattr(model, "peft_config", {})
    return [f"{name} {config.peft_type.value} {getattr(config, 'r', '')}" for name, config in sorted(configs.items())]


def _is_peft(model: object) -> bool:
    peft: Any = sys.modules.get("peft")
    return isinstance(model, nn.Module) and peft is not None and isinstance(model, peft.PeftModel)


def _refuse(model: nn.Module, config: Any) -> None:
    """Raises ValueError for the config of an adapter that packed rows cannot run with."""
    kind = config.peft_type.value
    if config.is_prompt_learning or config.is_adaption_prompt:
        reason = "puts learned states before each prompt"
    elif getattr(config, "alora_invocation_tokens", None):
        reason = "begins in the middle of each prompt (alora_invocation_tokens)"
    else:
        return
    raise ValueError(
        f"{type(model).__name__} has an adapter of type {kind} that {reason}, which dcut does not do. Use one that "
        f"lies in the layers, such as LoRA, or generate without dcut for this model"
    )
