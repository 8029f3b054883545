"""A tiny target with its own greedy answers, and their taps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.drafters.training import Answer

TAPS, MASK = (0, 2), 3


@dataclass
class World:
    """A target, its answers, and what reads its layers."""

    target: PreTrainedModel
    answers: list[Answer]

    def taps(self, answer: Answer) -> Tensor:
        """Returns taps from the stock forward, which hidden_states gives as long as the last layer is none of them."""
        with torch.no_grad():
            states = self.target(torch.tensor([answer.ids]), output_hidden_states=True).hidden_states
        last: list[Tensor] = []
        handle = self.target.get_decoder().layers[2].register_forward_hook(lambda m, i, o: last.append(o))
        with torch.no_grad():
            self.target(torch.tensor([answer.ids]))
        handle.remove()
        return torch.cat([states[1][0], last[0][0]], dim=-1)

    def drafter(self, seed: int = 0, **options: Any) -> DFlashDrafter:
        settings = {"taps": TAPS, "mask_token_id": MASK, "block_size": 5, "layers": 2, "dtype": self.target.dtype}
        return DFlashDrafter.random(self.target.config, seed=seed, **(settings | options))


def answers_of(target: PreTrainedModel, prompts: Sequence[Sequence[int]], tokens: int) -> list[Answer]:
    """Returns the target's greedy answers by plain `generate`, a prompt at a time."""
    found = []
    for prompt in prompts:
        ids = target.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False)[0].tolist()
        found.append(Answer(tuple(ids), len(prompt)))
    return found


@pytest.fixture
def make_world(make_target: Callable[..., PreTrainedModel]) -> Callable[..., World]:
    """`make_world(dtype=torch.float64, count=6, tokens=24)`."""

    def build(dtype: torch.dtype = torch.float64, count: int = 6, tokens: int = 24) -> World:
        target = make_target("llama", dtype=dtype).requires_grad_(False)
        prompts = [[5 + i, 17, 40 + 3 * i, 9][: 1 + i % 4] for i in range(count)]
        return World(target, answers_of(target, prompts, tokens))

    return build
