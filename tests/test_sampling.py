"""Sampling: tokens depend on a request's seed and prompt, not on drafter, budget or company, and follow the law.

Random float64 models, where packed and padded rows agree to the last few bits. Tests of a distribution fail by chance
once in 10,000 runs (ALPHA); their seed is new every time, and printed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_dcut import PromptLookupDrafter
from hf_dcut.drafters import DFlashDrafter
from hf_dcut.drafters.base import Drafter

Inputs = dict[str, torch.Tensor]
ROWS, NEW, D = 5, 24, 6
ALPHA = 1e-4
SEEDS = [31, 4, 159, 26, 5]

# The default of `generate` is top_k=50.
WARPERS: dict[str, dict[str, Any]] = {
    "none": {"top_k": 0},
    "default": {},
    "cold": {"temperature": 0.6, "top_k": 0},
    "hot": {"temperature": 1.8, "top_k": 0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8, "top_k": 0},
    "top_p above 1": {"top_p": 1.5, "top_k": 0},
    "min_p": {"min_p": 0.1, "top_k": 0},
    "typical": {"typical_p": 0.7, "top_k": 0},
    "epsilon": {"epsilon_cutoff": 0.02, "top_k": 0},
    "eta": {"eta_cutoff": 0.03, "top_k": 0},
    "top_h": {"top_h": 0.5, "top_k": 0},
    "several": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
}
WALKED: dict[str, dict[str, Any]] = {
    "penalty": {"repetition_penalty": 1.4},
    "bans and warpers": {"no_repeat_ngram_size": 2, "temperature": 0.8, "top_p": 0.9, "renormalize_logits": True},
}


def random_dflash(model: PreTrainedModel) -> DFlashDrafter:
    shape = {"taps": [0, 2], "mask_token_id": 3, "block_size": D + 1, "layers": 1, "dtype": model.dtype}
    return DFlashDrafter.random(model.config, **shape)


def sample(model: PreTrainedModel, inputs: Inputs, **options: Any) -> Any:
    asked = {"do_sample": True, "max_new_tokens": NEW, "seed": SEEDS, "return_dict_in_generate": True, **options}
    return model.generate(**inputs, **asked)


def new_tokens(output: Any, inputs: Inputs) -> list[list[int]]:
    """Returns what was generated, without pads behind the end."""
    rows = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    return [row[: row.index(0)] if 0 in row else row for row in rows]


def drafters(
    model: PreTrainedModel, inputs: Inputs, knowing: Callable[..., Drafter], output: Any
) -> dict[str, Drafter]:
    return {
        "oracle": knowing(inputs, output.sequences, D),
        "lookup": PromptLookupDrafter(D, 1),
        "dflash": random_dflash(model),
    }


@pytest.mark.parametrize("warper", {**WARPERS, **WALKED}.values(), ids={**WARPERS, **WALKED})
def test_drafter_budget_and_company_change_nothing(
    model: PreTrainedModel, inputs: Inputs, knowing: Callable[..., Drafter], warper: dict[str, Any]
) -> None:
    alone = sample(model, inputs, **warper, dcut="none", output_scores=True)
    said = new_tokens(alone, inputs)
    for name, drafter in drafters(model, inputs, knowing, alone).items():
        for budget in (1.0, 0.4):
            output = sample(model, inputs, **warper, assistant_model=drafter, dcut=budget, output_scores=True)
            assert torch.equal(output.sequences, alone.sequences)
            assert output.stats.accepted_tokens > 0 or name != "oracle"
            for column, (own, wanted) in enumerate(zip(output.scores, alone.scores, strict=True)):
                live = [row for row, text in enumerate(said) if column < len(text)]
                torch.testing.assert_close(own[live], wanted[live], rtol=1e-6, atol=1e-6)
    for rows in ([3, 1, 4, 0, 2], [2], [4, 1], [0, 2, 3]):
        some, seeds = {key: value[rows] for key, value in inputs.items()}, [SEEDS[row] for row in rows]
        drafter = knowing(inputs, alone.sequences, D)
        output = sample(model, some, **warper, seed=seeds, assistant_model=drafter, dcut=0.4)
        assert new_tokens(output, some) == [said[row] for row in rows]


def test_warpers_and_seeds_do_change_the_text(model: PreTrainedModel, inputs: Inputs) -> None:
    options = {name: option for name, option in {**WARPERS, **WALKED}.items() if name != "top_p above 1"}
    texts = [sample(model, inputs, **option, dcut="none").sequences.tolist() for option in options.values()]
    assert len({str(text) for text in texts}) == len(texts)
    other = sample(model, inputs, top_k=0, seed=[seed + 1000 for seed in SEEDS], dcut="none").sequences.tolist()
    assert all(ours != theirs for ours, theirs in zip(texts[0], other, strict=True))


def test_top_p_above_1_asks_for_nothing(model: PreTrainedModel, inputs: Inputs) -> None:
    texts = [sample(model, inputs, **WARPERS[name], dcut="none").sequences for name in ("none", "top_p above 1")]
    assert torch.equal(*texts)


def test_a_temperature_near_0_is_greedy(model: PreTrainedModel, inputs: Inputs) -> None:
    greedy = model.generate(**inputs, do_sample=False, max_new_tokens=NEW)
    output = sample(model, inputs, temperature=1e-6, prompt_lookup_num_tokens=D, dcut=0.5)
    assert torch.equal(output.sequences, greedy)


# Where the seeds come from.


def test_one_integer_is_a_seed_for_every_row(model: PreTrainedModel, inputs: Inputs) -> None:
    counted, listed, other = (sample(model, inputs, seed=seed, dcut="none") for seed in (7, [7, 8, 9, 10, 11], 8))
    assert torch.equal(counted.sequences, listed.sequences)
    assert not torch.equal(counted.sequences, other.sequences)
    same = sample(model, {name: tokens[:1].expand(4, -1) for name, tokens in inputs.items()}, seed=7, dcut="none")
    assert len({str(row) for row in same.sequences.tolist()}) == 4


def test_a_generator_is_a_seed(model: PreTrainedModel, inputs: Inputs) -> None:
    before = torch.random.get_rng_state()
    texts = [
        sample(model, inputs, seed=None, generator=torch.Generator().manual_seed(k), dcut="none").sequences.tolist()
        for k in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.random.get_rng_state(), before), "torch's own is left alone"


@pytest.mark.parametrize("dcut", ["none", 0.4])
def test_manual_seed_is_a_seed(model: PreTrainedModel, inputs: Inputs, dcut: Any) -> None:
    drafter, texts = random_dflash(model), []
    for seed in (1, 1, 2, None):
        if seed is not None:
            torch.manual_seed(seed)
        texts.append(sample(model, inputs, seed=None, assistant_model=drafter, dcut=dcut).sequences.tolist())
    assert texts[0] == texts[1] != texts[2]
    assert texts[3] != texts[2], "the next call goes on"


def test_greedy_calls_draw_nothing(model: PreTrainedModel, inputs: Inputs) -> None:
    before = torch.random.get_rng_state()
    model.generate(**inputs, do_sample=False, max_new_tokens=4, prompt_lookup_num_tokens=3, dcut=0.5)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_sampling_by_the_models_own_config(model: PreTrainedModel, inputs: Inputs) -> None:
    before = dict(vars(model.generation_config))
    try:
        model.generation_config.do_sample, model.generation_config.temperature = True, 0.7
        own = model.generate(**inputs, max_new_tokens=NEW, seed=SEEDS, dcut="none")
    finally:
        vars(model.generation_config).update(before)
    assert torch.equal(own, sample(model, inputs, temperature=0.7, dcut="none").sequences)


# The law.

SMALL = 12


@pytest.fixture(scope="module")
def small(tiny_llama: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    shape = {"vocab_size": SMALL, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    return tiny_llama(torch.float32, **shape, num_key_value_heads=1, eos_token_id=None)


def law(model: PreTrainedModel, prompt: torch.Tensor, warper: dict[str, Any]) -> torch.Tensor:
    """Returns the joint law of the next two tokens, float64 [V * V], from the scores that plain `generate` draws by."""
    prompts, joint = prompt, torch.ones(1, 1).double()
    for _ in range(2):
        options = {"max_new_tokens": 1, "do_sample": True, "return_dict_in_generate": True, "output_scores": True}
        output = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options, **warper)
        joint = (joint.view(-1, 1) * output.scores[0].double().softmax(dim=1)).view(-1)
        prompts = torch.cat([prompts.repeat_interleave(SMALL, 0), torch.arange(SMALL).repeat(len(prompts))[:, None]], 1)
    return joint


@pytest.mark.parametrize("warper", {**WARPERS, "penalty": WALKED["penalty"]}.values(), ids=[*WARPERS, "penalty"])
def test_tokens_follow_the_law_of_plain_generate(
    small: PreTrainedModel,
    knowing: Callable[..., Drafter],
    chance: Callable[[torch.Tensor, torch.Tensor], float],
    fresh_seed: int,
    warper: dict[str, Any],
) -> None:
    rows, calls, prompt = 512, 4, torch.tensor([[3, 7, 4, 7]])
    many, counts, accepted = prompt.expand(rows, -1), torch.zeros(SMALL * SMALL, dtype=torch.int64), 0
    one = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    drafter = knowing(one, small.generate(**one, do_sample=False, max_new_tokens=3), 2, (1.0,))
    for call in range(calls):
        output = sample(
            small,
            {"input_ids": many, "attention_mask": torch.ones_like(many)},
            **warper,
            max_new_tokens=3,
            seed=fresh_seed + call * rows,
            assistant_model=drafter,
            dcut=0.6,
        )
        accepted += output.stats.accepted_tokens
        first, second, _ = output.sequences[:, -3:].unbind(dim=1)
        counts += torch.bincount(first * SMALL + second, minlength=SMALL * SMALL)
    assert accepted > 0, "some of the second tokens were drafted"
    assert chance(counts, law(small, prompt, warper)) > ALPHA
