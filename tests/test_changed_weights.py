"""The target's weights change between two calls, as in reinforcement learning: the second call is the new model's.

Nothing that is kept from one call to the next may hold weights: not the draft head cut to the draft vocabulary, tied
embeddings, prompts' K/V or the record of models that were tried out. The drafter stays, so each change is compared with
a fresh copy of the changed model and a fresh drafter: same tokens, and step for step the same drafts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_dcut import BatchManager, DCutOutput
from hf_dcut.drafters import DFlashDrafter

Inputs = dict[str, torch.Tensor]
D, NEW = 4, 20


def random_dflash(model: PreTrainedModel) -> DFlashDrafter:
    """Returns a drafter that borrows head and embeddings of its target, the head in part."""
    shape = {"taps": [0, 2], "mask_token_id": 3, "block_size": D + 1, "layers": 2, "dtype": model.dtype}
    return DFlashDrafter.random(model.config, draft_ids=range(0, 101, 2), **shape)


def generate(
    model: PreTrainedModel, inputs: Inputs, drafter: DFlashDrafter | None = None, **options: Any
) -> DCutOutput:
    options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, **options}
    if drafter is not None:
        options |= {"assistant_model": drafter, "dcut": 0.5}
    return model.generate(**inputs, return_dict_in_generate=True, **options)


def noisy(weight: torch.Tensor) -> torch.Tensor:
    return weight + 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=weight.dtype)


@torch.no_grad()
def in_place(model: PreTrainedModel) -> None:
    for weight in model.parameters():
        weight.add_(noisy(weight) - weight)


def by_data(model: PreTrainedModel) -> None:
    for weight in model.parameters():
        weight.data.copy_(noisy(weight.data))


def other_storage(model: PreTrainedModel) -> None:
    for weight in model.parameters():
        weight.data = noisy(weight.data)


def state_dict(model: PreTrainedModel) -> None:
    model.load_state_dict({name: noisy(weight) for name, weight in model.state_dict().items()})


def assigned(model: PreTrainedModel) -> None:
    model.load_state_dict({name: noisy(weight) for name, weight in model.state_dict().items()}, assign=True)


def head_alone(model: PreTrainedModel) -> None:
    model.set_output_embeddings(nn.Linear(64, 101, bias=False, dtype=torch.float64))
    nn.init.normal_(model.lm_head.weight, std=0.3, generator=torch.Generator().manual_seed(1))


def embeddings_alone(model: PreTrainedModel) -> None:
    model.get_input_embeddings().weight.data = noisy(model.get_input_embeddings().weight.data)


CHANGES = (in_place, by_data, other_storage, state_dict, assigned, head_alone, embeddings_alone)
UNTYING = (assigned, head_alone)


@pytest.mark.parametrize(
    ("change", "tied"),
    [*((change, False) for change in CHANGES), *((change, True) for change in CHANGES if change not in UNTYING)],
    ids=lambda value: getattr(value, "__name__", "tied" if value else "untied"),
)
def test_the_next_call_is_that_of_the_new_weights(
    make_target: Callable[..., PreTrainedModel], inputs: Inputs, change: Callable[[PreTrainedModel], None], tied: bool
) -> None:
    model = make_target("qwen3", tie_word_embeddings=tied)
    drafter = random_dflash(model)
    before = generate(model, inputs, drafter)
    change(model)
    plain, after = generate(model, inputs), generate(model, inputs, drafter)
    assert not torch.equal(before.sequences, plain.sequences)
    assert torch.equal(after.sequences, plain.sequences)
    copied = copy.deepcopy(model)
    fresh = generate(copied, inputs, random_dflash(copied))
    assert after.stats is not None
    assert fresh.stats is not None
    assert [(r.kept, r.accepted) for r in after.stats.records] == [(r.kept, r.accepted) for r in fresh.stats.records]


def test_requests_of_a_manager_that_come_after_the_change(make_target: Callable[..., PreTrainedModel]) -> None:
    model, prompt = make_target("llama"), [5, 6, 7, 8]
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 9, "eos_token_id": None}
    with BatchManager(model, max_length=32, assistant_model=random_dflash(model), dcut=0.5, **options) as manager:
        texts = []
        for change in (None, by_data, embeddings_alone):
            if change:
                change(model)
            texts.append(manager.get_result(manager.add_request(prompt)).generated_tokens)
            assert texts[-1] == model.generate(torch.tensor([prompt]), **options)[0, 4:].tolist()
    assert len({tuple(text) for text in texts}) == 3
