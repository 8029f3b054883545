"""Rollouts with a memory are those without, and it has learnt them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from transformers import PreTrainedModel

import hf_dcut


def test_epochs_are_the_same_in_all_ways(
    load_example: Callable[[str], ModuleType], make_target: Callable[..., PreTrainedModel]
) -> None:
    example, model = load_example("rollouts"), make_target("llama", dtype=torch.float32)
    lookup, memory = hf_dcut.PromptLookupDrafter(4), hf_dcut.SuffixDrafter()
    options = {"max_batch_size": 4, "max_new_tokens": 40, "num_return_sequences": 3, "temperature": 0.7}
    both = hf_dcut.BestOf([lookup, memory])
    epochs = list(example.rollouts(model, lookup, both, [[5, 6, 7], [8, 9]], 2, **options))
    for epoch in epochs:
        assert list(epoch) == ["no drafts", "drafter", "drafter and memory"]
        answers, _, plain = epoch["no drafts"]
        assert len(answers) == 6
        assert plain == 1.0
        assert all(said == answers and speed > 0 and each >= 1.0 for said, speed, each in epoch.values())
    first, second = (epoch["no drafts"][0] for epoch in epochs)
    assert first != second
    known = torch.cat([index.tokens for index in memory.corpus.indexes]).tolist()
    assert any(known[at : at + 20] == first[0][:20] for at in range(len(known)))
