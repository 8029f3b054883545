"""Memory stays where it is, however many steps are taken and however batches change."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_dcut import BatchStreamer, PromptLookupDrafter
from hf_dcut.drafters import DFlashDrafter

pytestmark = pytest.mark.slow

EARLY, LATE = 1_000, 5_000


def live() -> tuple[int, int]:
    """Returns how many tensors are alive, and the bytes they hold."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return len(tensors), sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_thousands_of_steps_leave_nothing_behind(
    tiny_llama: Callable[..., PreTrainedModel], make_prompts: Callable[..., dict[str, torch.Tensor]]
) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = tiny_llama(torch.float32, **shape, num_key_value_heads=1, eos_token_id=[40, 77])
    block = {"taps": [0], "mask_token_id": 3, "block_size": 4, "layers": 1, "dtype": torch.float32}
    lookup, dflash = PromptLookupDrafter(3), DFlashDrafter.random(model.config, **block)
    calls: list[dict[str, Any]] = [
        {"do_sample": False, "assistant_model": lookup, "dcut": 0.5},
        {"do_sample": True, "assistant_model": dflash, "dcut": {"budget": 0.5, "proposals": "sampled"}},
        {"do_sample": False, "assistant_model": dflash, "dcut": 1.0, "output_scores": True, "no_repeat_ngram_size": 3},
        {"do_sample": True, "assistant_model": dflash, "dcut": "none", "output_logits": True, "top_p": 0.9},
    ]
    steps, early = 0, None
    for options, rows in zip(cycle(calls), cycle([1, 9, 2, 5, 3]), strict=False):
        streamer = BatchStreamer(callback=lambda piece: None)
        asked = {**options, "max_new_tokens": 250, "streamer": streamer, "return_dict_in_generate": True}
        output = model.generate(**make_prompts(rows, seed=rows), **asked)
        steps += output.stats.steps
        del output
        if early is None and steps >= EARLY:
            early = live()
        if steps >= LATE:
            break
    assert live() == early
