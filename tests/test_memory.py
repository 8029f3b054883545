"""Memory stays where it is, however many steps are taken and however batches change."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel

from hf_dcut import BatchStreamer, PromptLookupDrafter
from hf_dcut.drafters import DFlashDrafter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]

EARLY, LATE = 1_000, 20_000


class BanLast(LogitsProcessor):
    """Never the same token twice in a row. Unknown, so it is walked."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


def never(ids: torch.Tensor, scores: object) -> bool:
    return False


def live() -> tuple[int, int]:
    """Returns how many tensors are alive, and the bytes they hold."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return len(tensors), sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_twenty_thousand_steps_leave_nothing_behind(
    tiny_llama: Callable[..., PreTrainedModel], make_prompts: Callable[..., dict[str, torch.Tensor]]
) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "max_position_embeddings": 1_024}
    model = tiny_llama(torch.float32, **shape, eos_token_id=[40, 77])
    # What has nothing to do with what is kept from step to step only takes time.
    (layer,) = model.model.layers
    layer.input_layernorm = layer.post_attention_layernorm = layer.mlp = model.model.norm = torch.nn.Identity()
    block = {"taps": [0], "mask_token_id": 3, "block_size": 4, "layers": 1, "dtype": torch.float32}
    lookup, dflash = PromptLookupDrafter(3), DFlashDrafter.random(model.config, **block)
    drawn, recorded = {"budget": 0.5, "proposals": "sampled"}, {"output_scores": True, "output_logprobs": True}
    walked = {"logits_processor": [BanLast()], "stopping_criteria": [never], "output_scores": True}
    calls: list[dict[str, Any]] = [
        {"do_sample": False, "max_new_tokens": 80, "assistant_model": lookup, "dcut": 0.5},
        {"do_sample": True, "max_new_tokens": 20, "assistant_model": dflash, "dcut": drawn},
        {"max_new_tokens": 50, "assistant_model": dflash, "dcut": 1.0, **recorded, "no_repeat_ngram_size": 3},
        {"do_sample": True, "max_new_tokens": 50, "dcut": "none", "output_logits": True, "top_p": 0.9},
        {"do_sample": False, "max_new_tokens": 30, "assistant_model": lookup, "dcut": 0.5, **walked},
        # Most steps are of the cheapest kind, so that many can be taken.
        {"do_sample": False, "max_new_tokens": 1_000, "dcut": "none", "eos_token_id": None},
    ]
    steps, early = 0, None
    for options, rows in zip(cycle(calls), cycle([1, 9, 2, 5, 3]), strict=False):
        streamer = BatchStreamer(callback=lambda piece: None)
        asked = {**options, "streamer": streamer, "return_dict_in_generate": True}
        output = model.generate(**make_prompts(rows, seed=rows), **asked)
        steps += output.stats.steps
        del output
        if early is None and steps >= EARLY:
            early = live()
        if steps >= LATE:
            break
    assert early is not None
    # There may be less, where an earlier test's tensors had not been collected at first.
    assert all(late <= before for late, before in zip(live(), early, strict=True))
