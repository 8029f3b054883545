"""The drafter that a command names: a folder, a Hub id, or one that is made up for measuring."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from hf_dcut.bench import peers
from hf_dcut.drafters import AutoDrafter
from hf_dcut.drafters.base import Drafter
from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.drafters.names import named_drafter
from hf_dcut.drafters.oracle import OracleDrafter

# Confidences of the oracle's blocks: some are easy, some hard. With 15 drafts, all verified, a step commits 4.9
# tokens on average.
ORACLE_PROFILE = (0.97, 0.86, 0.62, 0.35, 0.15)
_AT_ONCE = 16
# Halvings of an interval of exponents: far below what anybody can measure.
_HALVINGS = 60


def make_drafter(
    name: str, model: PreTrainedModel, prompts: Sequence[list[int]] = (), max_new_tokens: int = 0
) -> Drafter:
    """Returns the drafter a plan names.

    Args:
        name: folder or Hub id, "oracle" (block 16, calibrated), "random" (an untrained DFlash), "lookup", or one of the
            others with "+lookup" behind it.
        model: the target.
        prompts: token ids; the oracle must know the target's answers to them.
        max_new_tokens: of each answer.

    Raises:
        ValueError: no such drafter, or one that remembers: the method that runs last would know all answers.
    """

    def load(source: str) -> Drafter:
        if source == "random":
            return _untrained(model)
        if source == "oracle":
            known = _continuations(model, prompts, max_new_tokens)
            return OracleDrafter(known, draft_tokens=15, profile=ORACLE_PROFILE)
        return AutoDrafter.from_pretrained(source, device=model.device)

    drafter = named_drafter(name, load)
    if drafter.remembers:
        raise ValueError(
            f"drafter {name!r} remembers what was generated, so that every method would learn from those before it: "
            "leave out suffix, and see examples/rollouts.py for what it brings"
        )
    return drafter


def _untrained(model: PreTrainedModel) -> DFlashDrafter:
    config = model.config.get_text_config(decoder=True)
    taps = sorted({1, config.num_hidden_layers // 2, config.num_hidden_layers - 3})
    drafter = DFlashDrafter.random(config, taps=taps, mask_token_id=0, block_size=8, layers=2, dtype=torch.bfloat16)
    return drafter.to(model.device)


def profile_for(tokens_per_step: float, draft_tokens: int = 15) -> tuple[float, ...]:
    """Returns the oracle's profile with which a step commits so many tokens on average, all drafts verified.

    The moods of `ORACLE_PROFILE`, all raised to one power.

    Args:
        tokens_per_step: the paper's mean accepted tokens, the target's own included.
        draft_tokens: D.

    Raises:
        ValueError: not between 1 and D + 1.
    """
    if not 1 < tokens_per_step < draft_tokens + 1:
        raise ValueError(f"tokens_per_step={tokens_per_step}: give a number between 1 and D + 1 = {draft_tokens + 1}")
    # The powers e^-12 and e^12 make every draft sure, and none.
    low, high = -12.0, 12.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = _moods(middle)
        committed = sum(c**k for c in found for k in range(draft_tokens + 1)) / len(found)
        low, high = (middle, high) if committed > tokens_per_step else (low, middle)
    return _moods(low)


def _moods(log_power: float) -> tuple[float, ...]:
    return tuple(c ** math.exp(log_power) for c in ORACLE_PROFILE)


def _continuations(
    model: PreTrainedModel, prompts: Sequence[list[int]], max_new_tokens: int
) -> dict[tuple[int, ...], list[int]]:
    """Returns what plain `generate` says to each prompt; what stands behind an end token does no harm."""
    if not prompts:
        return {}
    options = peers.Options(_AT_ONCE, max_new_tokens, 0.0, 0, None)
    _, answers, _ = peers.run(peers.GENERATE, model, prompts, options)
    return dict(zip(map(tuple, prompts), answers, strict=True))
