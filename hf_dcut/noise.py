"""Counter-based random numbers: a number is a function of (request seed, position, purpose), not of what ran before.

So a request's tokens do not depend on its neighbours, on the row it stands in, on how many drafts were cut, or on the
rank that draws; and drafting, acceptance and recovery never share a number. The generator is Philox 4x32-10 (Salmon
et al., SC 2011), written in plain integer torch so that every device gives the same bits.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


class Purpose(IntEnum):
    """What a number is drawn for; each purpose has numbers of its own."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3


def noise(seed: Tensor, position: Tensor, purpose: Purpose, index: Tensor | int = 0) -> Tensor:
    """Returns uniform numbers in (0, 1), float64 of the common shape of the arguments, with 52 random bits each.

    Args:
        seed: int64, key of the request; all 64 bits count.
        position: int64, absolute position of the token the number decides.
        purpose: what it is drawn for.
        index: int64, counts several numbers of one purpose at one position.
    """
    counts = torch.as_tensor(index, device=seed.device, dtype=torch.int64)
    seed, position, counts = torch.broadcast_tensors(seed, position, counts)
    counter = [position & _MASK, (position >> 32) & _MASK, torch.full_like(position, int(purpose)), counts & _MASK]
    high, low, _, _ = _philox(counter, [seed & _MASK, (seed >> 32) & _MASK])
    bits = ((high >> 6) << 26) | (low >> 6)
    return (bits.double() + 0.5) * 2.0**-52


def _philox(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Returns the four 32-bit words (held in int64) that Philox 4x32-10 makes of a counter and a key."""
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(counter[0], _MULTIPLIERS[0])
        high1, low1 = _multiply(counter[2], _MULTIPLIERS[1])
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(k + step) & _MASK for k, step in zip(key, _KEY_STEPS, strict=True)]
    return counter


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Returns the high and low 32 bits of word * factor; in halves, since int64 has no room for all 64 bits."""
    low = word * (factor & 0xFFFF)
    high = word * (factor >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
