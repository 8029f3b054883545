"""The drafter that a command names: a folder, a Hub id, or one that is made up for measuring."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from hf_dcut.bench import peers
from hf_dcut.drafters import AutoDrafter
from hf_dcut.drafters.base import Drafter
from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.drafters.oracle import OracleDrafter
from hf_dcut.drafters.prompt_lookup import PromptLookupDrafter

# Confidences of the oracle's blocks: some are easy, some hard. Chosen so that a block of 15 drafts commits 4 tokens on
# average when all are verified.
ORACLE_PROFILE = (0.97, 0.86, 0.62, 0.35, 0.15)
_AT_ONCE = 16


def make_drafter(
    name: str, model: PreTrainedModel, prompts: Sequence[list[int]] = (), max_new_tokens: int = 0
) -> Drafter:
    """Returns the drafter a plan names.

    Args:
        name: folder or Hub id, "oracle" (block 16, calibrated), "random" (an untrained DFlash) or "lookup".
        model: the target.
        prompts: token ids; the oracle must know the target's answers to them.
        max_new_tokens: of each answer.
    """
    if name == "lookup":
        return PromptLookupDrafter()
    if name == "random":
        config = model.config.get_text_config(decoder=True)
        taps = sorted({1, config.num_hidden_layers // 2, config.num_hidden_layers - 3})
        drafter = DFlashDrafter.random(config, taps=taps, mask_token_id=0, block_size=8, layers=2, dtype=torch.bfloat16)
        return drafter.to(model.device)
    if name == "oracle":
        return OracleDrafter(_continuations(model, prompts, max_new_tokens), draft_tokens=15, profile=ORACLE_PROFILE)
    return AutoDrafter.from_pretrained(name, device=model.device)


def _continuations(
    model: PreTrainedModel, prompts: Sequence[list[int]], max_new_tokens: int
) -> dict[tuple[int, ...], list[int]]:
    """Returns what plain `generate` says to each prompt; what stands behind an end token does no harm."""
    if not prompts:
        return {}
    options = peers.Options(_AT_ONCE, max_new_tokens, 0.0, 0, None)
    _, answers, _ = peers.run(peers.GENERATE, model, prompts, options)
    return dict(zip(map(tuple, prompts), answers, strict=True))
