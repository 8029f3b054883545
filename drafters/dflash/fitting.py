"""Whether a DFlash drafter belongs to a target: what does not fit, and what to do about it.

A wrong pair that happens to have the right shapes runs, and has its drafts rejected. So everything that can be compared
is compared, by configs alone first, as `hf-dcut inspect` does before any weight is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_dcut.drafters.dflash.config import DFlashConfig
from hf_dcut.drafters.dflash.vocabulary import gives_raw_rows

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from hf_dcut.drafters.dflash.model import DFlashModel

# Drafters of Qwen3 that know answers without thinking only (z-lab/dflash#133): hidden size, target's layers.
_WITHOUT_THINKING = {(2560, 36), (4096, 36)}
_QWEN3_MASK = 151669


def config_faults(drafter: DFlashConfig, target: PreTrainedConfig) -> list[str]:
    """Returns what in the target's config does not fit the drafter's; empty when all does."""
    target = target.get_text_config(decoder=True)
    pairs = (
        ("hidden_size", drafter.hidden_size, target.hidden_size),
        ("num_target_layers", drafter.num_target_layers, target.num_hidden_layers),
        ("vocab_size", drafter.vocab_size, target.vocab_size),
    )
    faults = [
        f"drafter {name}={ours}, but the target has {theirs}: they do not belong together. Load the target that the "
        "drafter was trained for, or a drafter for this target"
        for name, ours, theirs in pairs
        if ours is not None and ours != theirs
    ]
    outside = [tap for tap in drafter.target_layer_ids if tap >= target.num_hidden_layers]
    if outside:
        faults.append(
            f"drafter target_layer_ids={list(drafter.target_layer_ids)}: the target has layers 0 to "
            f"{target.num_hidden_layers - 1}, not {outside}. Load the target that the drafter was trained for"
        )
    return faults


def model_faults(drafter: DFlashModel, target: PreTrainedModel) -> list[str]:
    """Returns what the target's modules lack of what the drafter borrows; empty when all is there."""
    config, embeddings, faults = drafter.config, target.get_input_embeddings(), []
    rows = getattr(drafter.embed_tokens or embeddings, "num_embeddings", config.vocab_size)
    if drafter.mask_embedding is None and rows is not None and config.mask_token_id >= rows:
        faults.append(
            f"drafter mask_token_id={config.mask_token_id}: the embeddings have rows 0 to {rows - 1}. Load the target "
            "that the drafter was trained for, and do not shrink its embeddings"
        )
    if drafter.embed_tokens is None and config.input_embedding_scale is not None and not gives_raw_rows(target):
        faults.append(
            f"the drafter reads the target's embedding table, and {type(embeddings).__name__} has no plain one: load "
            "the target without quantising or sharding its embeddings"
        )
    if drafter.lm_head is None and target.get_output_embeddings() is None:
        faults.append(
            f"the target {type(target).__name__} has no output embeddings, which a DFlash drafter shares: "
            "load it as a causal language model"
        )
    device = drafter.fc.weight.device
    if target.device != device:
        faults.append(
            f"the drafter is on {device}, the target on {target.device}: call drafter.to({str(target.device)!r})"
        )
    return faults


def notes(config: DFlashConfig) -> list[str]:
    """Returns what a user of this drafter should know, and nothing else would tell."""
    found = []
    if (config.hidden_size, config.num_target_layers) in _WITHOUT_THINKING and config.mask_token_id == _QWEN3_MASK:
        found.append(
            "drafters of Qwen3-4B and Qwen3-8B were trained on answers without thinking: pass enable_thinking=False to "
            "apply_chat_template, or few drafts are accepted"
        )
    if config.dtype == "float16":
        found.append(float16_note("drafter"))
    return found


def float16_note(who: str) -> str:
    """Returns the warning about a `who` in float16."""
    return (
        f"the {who} runs in float16: hidden states of many models overflow in it, and drafts are then rejected. Load "
        "it with dtype=torch.bfloat16"
    )
