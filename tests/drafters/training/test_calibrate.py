"""The factor that makes confidences hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_dcut.drafters.training.calibrate import MULTIPLIERS, best_multiplier


def blocks(sharpness: float, blocks: int = 4000) -> tuple[Tensor, Tensor]:
    """Returns logits and labels of a drafter that should multiply its logits by `sharpness`."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(blocks, 3, 12, generator=generator) * 2
    shares = (logits * sharpness).softmax(-1).flatten(0, 1)
    return logits, torch.multinomial(shares, 1, generator=generator).view(blocks, 3)


@pytest.mark.parametrize("sharpness", [0.5, 2**-0.25, 1.0, 2**0.5])
def test_the_factor_is_found(sharpness: float) -> None:
    logits, label = blocks(sharpness)
    # In two parts, which must count as one.
    found = best_multiplier([(logits[:1000], label[:1000]), (logits[1000:], label[1000:])])
    assert found == pytest.approx(sharpness)


def test_places_without_a_label_count_nothing() -> None:
    logits, label = blocks(2**0.5)
    padded = torch.cat([label, torch.full_like(label, -1)])
    assert best_multiplier([(torch.cat([logits, logits * 9]), padded)]) == pytest.approx(2**0.5)
    assert best_multiplier([(logits, torch.full_like(label, -1))]) == 1.0
    assert best_multiplier([]) == 1.0


def test_a_drafter_that_is_never_right_gets_the_least() -> None:
    logits, _ = blocks(1.0, 50)
    assert best_multiplier([(logits, logits.argmin(-1))]) == MULTIPLIERS[0]
