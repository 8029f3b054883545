"""`ChainOracle`: drafts as good as a profile says, for chain models. All numbers made with it are synthetic.

As `drafters/oracle.py`, but for a target that gives every token one successor. So it needs to know no text and reads
nothing on the host. Behind a drafter (`drafters/wrapping.py`) it makes every step pay that drafter's price.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_dcut.bench.gpu.shapes import STRIDE
from hf_dcut.types import Batch, Drafts

# Different requests; seeds are taken modulo this.
_REQUESTS = 256


class ChainOracle:
    """Puts what a chain model will say in the place of drafts, with errors.

    Args:
        vocabulary: of the target.
        draft_tokens: D.
        profile: confidences a block can have, one drawn a block, all equally likely.
        longest: tokens of the longest request.
        device: where the drafts are.

    Attributes:
        profile: float32 [M]; another one of the same size may be written into it.
        capturable: a CUDA graph can hold it.
    """

    capturable = True

    def __init__(
        self, vocabulary: int, draft_tokens: int, profile: Sequence[float], longest: int, device: torch.device
    ):
        generator = torch.Generator().manual_seed(0)
        shape = (_REQUESTS, longest + draft_tokens + 1)
        self.vocabulary, self.places = vocabulary, shape[1]
        self.luck = torch.rand(shape, generator=generator).to(device)
        self.mood = torch.randint(len(profile), shape, generator=generator).to(device)
        self.profile = torch.tensor(profile, dtype=torch.float32, device=device)
        self.offset = torch.arange(1, draft_tokens + 1, device=device)

    def __call__(self, drafts: Drafts, batch: Batch) -> Drafts:
        """Returns the target's own continuation after each anchor; a draft of confidence c is right as often as c."""
        request, length = (batch.seed % _REQUESTS)[:, None], batch.length[:, None]
        confidence = self.profile[self.mood[request, length % self.places]].repeat(1, len(self.offset))
        wrong = self.luck[request, (length + self.offset) % self.places] >= confidence
        truth = batch.anchor[:, None] + STRIDE * self.offset + wrong
        return Drafts.chain(truth % self.vocabulary, confidence, drafts.count)
