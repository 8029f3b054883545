"""The door: how dcut is asked for, and everything it refuses before a token is generated."""

from __future__ import annotations

import inspect
import logging
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    MambaConfig,
    PreTrainedModel,
    T5Config,
)
from transformers.generation import (
    BaseStreamer,
    GenerateDecoderOnlyOutput,
    MaxLengthCriteria,
)

import hf_dcut
from hf_dcut import BestOf, DCutConfig, DCutOutput, PromptLookupDrafter, decoding
from hf_dcut.drafters import DFlashDrafter
from hf_dcut.drafters.base import Drafter
from hf_dcut.types import Batch, Drafts

Inputs = dict[str, torch.Tensor]
DRAFTER = PromptLookupDrafter(4)
GREEDY = {"do_sample": False, "max_new_tokens": 8}
NAMED = {**GREEDY, "return_dict_in_generate": True}


@pytest.fixture(scope="module")
def shared(tiny_llama: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return tiny_llama(eos_token_id=None)


@pytest.fixture
def model(shared: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The model; fails the test that leaves it other than it was."""
    before, options = state_of(shared), dict(vars(shared.generation_config))
    yield shared
    vars(shared.generation_config).clear()
    vars(shared.generation_config).update(options)
    assert state_of(shared) == before


def state_of(model: PreTrainedModel) -> tuple[Any, ...]:
    hooks = [name for name, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks]
    return model.config.to_dict(), model.config._attn_implementation, model.training, hooks, sorted(vars(model))


@pytest.fixture
def inputs(make_prompts: Callable[..., Inputs]) -> Inputs:
    return make_prompts(3)


@pytest.fixture
def expected(model: PreTrainedModel, inputs: Inputs) -> torch.Tensor:
    return model.generate(**inputs, **GREEDY)


# How dcut is asked for.


def test_by_the_call(model: PreTrainedModel, inputs: Inputs, expected: torch.Tensor) -> None:
    output = model.generate(**inputs, **NAMED, assistant_model=DRAFTER, dcut=0.5)
    assert isinstance(output, DCutOutput)
    assert output.stats is not None
    assert output.stats.budgets.keys() == {0.5}
    assert torch.equal(output.sequences, expected)


@pytest.mark.parametrize(
    "dcut", [True, "auto", "none", 0.25, 1, {"budget": 0.5}, DCutConfig(budget=1.0, draft_tokens=2)]
)
def test_in_every_form(model: PreTrainedModel, inputs: Inputs, expected: torch.Tensor, dcut: Any) -> None:
    tokens = model.generate(**inputs, **GREEDY, assistant_model=DRAFTER, dcut=dcut)
    assert torch.equal(tokens, expected), "a plain tensor, as without return_dict_in_generate"


def test_by_the_generation_config(model: PreTrainedModel, inputs: Inputs, expected: torch.Tensor) -> None:
    config = GenerationConfig(**NAMED, dcut={"budget": 0.5}, pad_token_id=0)
    output = model.generate(**inputs, generation_config=config, assistant_model=DRAFTER)
    assert isinstance(output, DCutOutput)
    assert torch.equal(output.sequences, expected)


def test_by_the_models_generation_config(model: PreTrainedModel, inputs: Inputs, expected: torch.Tensor) -> None:
    model.generation_config.dcut = 0.5
    output = model.generate(**inputs, **NAMED, assistant_model=DRAFTER)
    assert isinstance(output, DCutOutput)
    assert torch.equal(output.sequences, expected)


def test_a_hybrid_cache_of_the_models_own_config_asks_for_nothing(
    model: PreTrainedModel, inputs: Inputs, expected: torch.Tensor
) -> None:
    model.generation_config.cache_implementation = "hybrid"  # as Gemma 2 and 3 were published
    assert torch.equal(model.generate(**inputs, **GREEDY, assistant_model=DRAFTER, dcut=0.5), expected)


def test_the_call_comes_before_the_configs(model: PreTrainedModel, inputs: Inputs) -> None:
    model.generation_config.dcut = 0.25
    config = GenerationConfig(**NAMED, dcut=0.5, pad_token_id=0)
    by_config = model.generate(**inputs, generation_config=config, assistant_model=DRAFTER)
    by_call = model.generate(**inputs, generation_config=config, assistant_model=DRAFTER, dcut=1.0)
    assert (set(by_config.stats.budgets), set(by_call.stats.budgets)) == ({0.5}, {1.0})


def test_false_turns_it_off(model: PreTrainedModel, inputs: Inputs, expected: torch.Tensor) -> None:
    model.generation_config.dcut = True
    output = model.generate(**inputs, **NAMED, dcut=False)
    assert type(output) is GenerateDecoderOnlyOutput
    assert torch.equal(output.sequences, expected)


def test_the_drafter_may_come_by_position(model: PreTrainedModel, inputs: Inputs, expected: torch.Tensor) -> None:
    before_it = list(inspect.signature(GenerationMixin.generate).parameters).index("assistant_model") - 2
    arguments = [inputs["input_ids"], *[None] * before_it, DRAFTER]
    output = model.generate(*arguments, attention_mask=inputs["attention_mask"], **NAMED, dcut=0.5)
    assert isinstance(output, DCutOutput)
    assert torch.equal(output.sequences, expected)


def test_prompt_lookup_is_a_drafter_too(model: PreTrainedModel, inputs: Inputs, expected: torch.Tensor) -> None:
    output = model.generate(**inputs, **NAMED, prompt_lookup_num_tokens=3, max_matching_ngram_size=1, dcut=1.0)
    assert output.stats.drafted > 0
    assert torch.equal(output.sequences, expected)


def asking(model: PreTrainedModel, place: str, lookup: dict[str, int]) -> dict[str, Any]:
    """Returns options that ask for prompt lookup in the call or its config; else the model's own config asks for it."""
    if place == "config":
        return {"generation_config": GenerationConfig(**NAMED, **lookup)}
    if place == "model":
        model.generation_config.update(**lookup)
        return {**NAMED}
    return {**NAMED, **lookup}


@pytest.mark.parametrize("place", ["call", "config", "model"])
def test_prompt_lookup_is_asked_for_anywhere(model: PreTrainedModel, inputs: Inputs, place: str) -> None:
    lookup = {"prompt_lookup_num_tokens": 3}
    expected = model.generate(**inputs, **GREEDY)
    options = asking(model, place, lookup)
    output = model.generate(**inputs, **options, dcut=1.0)
    assert output.stats.drafted > 0
    assert torch.equal(output.sequences, expected)
    if place == "config":
        assert options["generation_config"].prompt_lookup_num_tokens == 3, "the caller's own stays as it was"


@pytest.mark.parametrize("place", ["call", "config", "model"])
def test_prompt_lookup_joins_the_assistant(
    model: PreTrainedModel, inputs: Inputs, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    drafters, original = [], decoding.open_engine

    def seen(target: PreTrainedModel, drafter: Drafter | None, *given: Any, **named: Any) -> Any:
        drafters.append(drafter)
        return original(target, drafter, *given, **named)

    monkeypatch.setattr(decoding, "open_engine", seen)
    lookup = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1}
    expected = model.generate(**inputs, **GREEDY)
    options = asking(model, place, lookup)
    for dcut in (1.0, "none"):
        output = model.generate(**inputs, **options, assistant_model=DRAFTER, dcut=dcut)
        assert torch.equal(output.sequences, expected)
    both, nobody = drafters
    assert nobody is None
    assert isinstance(both, BestOf)
    assert both.drafters[0] is DRAFTER
    assert both.drafters[1].fingerprint() == PromptLookupDrafter(3, 1).fingerprint()


def test_prompt_lookup_drafts_for_several_answers(model: PreTrainedModel, inputs: Inputs) -> None:
    options = {"do_sample": True, "max_new_tokens": 8, "num_return_sequences": 2, "seed": 5}
    plain = model.generate(**inputs, **options, dcut="none")
    assert torch.equal(model.generate(**inputs, **options, prompt_lookup_num_tokens=3, dcut=1.0), plain)


def test_no_drafter_is_needed_for_plain_steps(model: PreTrainedModel, inputs: Inputs, expected: torch.Tensor) -> None:
    output = model.generate(**inputs, **NAMED, dcut="none")
    assert (output.stats.drafted_steps, output.stats.plain_steps) == (0, 7)
    assert torch.equal(output.sequences, expected)


def test_the_function_needs_no_wrapped_generate(model: PreTrainedModel, inputs: Inputs, expected: torch.Tensor) -> None:
    hf_dcut.disable()
    try:
        with pytest.raises(ValueError, match="dcut"):
            model.generate(**inputs, **GREEDY, dcut=0.5)
        assert GenerationMixin.generate.__module__.startswith("transformers")
        assert torch.equal(model.generate(**inputs, **GREEDY), expected)
    finally:
        hf_dcut.enable()
        hf_dcut.enable()
    assert torch.equal(model.generate(**inputs, **GREEDY, assistant_model=DRAFTER, dcut=0.5), expected)
    assert torch.equal(hf_dcut.generate(model, **inputs, **GREEDY, assistant_model=DRAFTER, dcut=0.5), expected)


def test_without_dcut_the_call_is_plain(model: PreTrainedModel, inputs: Inputs) -> None:
    output = model.generate(**inputs, **NAMED, output_scores=True, repetition_penalty=1.3)
    assert type(output) is GenerateDecoderOnlyOutput
    assert len(output.scores) == 8
    beams = model.generate(**inputs, do_sample=False, max_new_tokens=4, num_beams=2, num_return_sequences=2)
    assert len(beams) == 6


def test_generate_shows_what_it_did_before() -> None:
    assert "assistant_model" in inspect.signature(GenerationMixin.generate).parameters
    assert GenerationMixin.generate.__name__ == "generate"
    assert "Generates sequences of token ids" in str(GenerationMixin.generate.__doc__)


def test_the_output_is_a_model_output(model: PreTrainedModel, inputs: Inputs) -> None:
    output = model.generate(**inputs, **NAMED, assistant_model=DRAFTER, dcut=0.5)
    assert list(output.keys()) == ["sequences", "finish_reasons", "stats"]
    assert output[0] is output["sequences"] is output.sequences


def test_a_saved_generation_config_keeps_its_dcut(
    model: PreTrainedModel, inputs: Inputs, expected: torch.Tensor, tmp_path: Path
) -> None:
    GenerationConfig(**NAMED, dcut=DCutConfig(budget=0.5), pad_token_id=0).save_pretrained(tmp_path)
    config = GenerationConfig.from_pretrained(tmp_path)
    output = model.generate(**inputs, generation_config=config, assistant_model=DRAFTER)
    assert set(output.stats.budgets) == {0.5}
    assert torch.equal(output.sequences, expected)


# Options that mean what they mean in plain generate.


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")
@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 20, "max_new_tokens": None},
        {"max_new_tokens": None},
        {"prefill_chunk_size": 2},
    ],
    ids=str,
)
def test_equal_options(model: PreTrainedModel, inputs: Inputs, options: dict[str, Any]) -> None:
    asked = {**GREEDY, **options}
    tokens = model.generate(**inputs, **asked, assistant_model=DRAFTER, dcut=0.5)
    assert torch.equal(tokens, model.generate(**inputs, **asked))


@pytest.mark.parametrize("pad", [0, 50])
@pytest.mark.parametrize("count", [1, 2])
def test_rows_that_end_early_are_filled_up(
    model: PreTrainedModel, inputs: Inputs, expected: torch.Tensor, count: int, pad: int
) -> None:
    ends = expected[:count, inputs["input_ids"].shape[1] + 2].tolist()
    options = {"eos_token_id": ends if count > 1 else ends[0], "pad_token_id": pad}
    tokens = model.generate(**inputs, **GREEDY, **options, assistant_model=DRAFTER, dcut=0.5)
    assert torch.equal(tokens, model.generate(**inputs, **GREEDY, **options))
    assert tokens[0, -1] == pad


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.int32, None])
def test_masks_of_any_kind(model: PreTrainedModel, inputs: Inputs, kind: torch.dtype | None) -> None:
    mask = {} if kind is None else {"attention_mask": inputs["attention_mask"].to(kind)}
    ids = inputs["input_ids"] if mask else inputs["input_ids"][:, -1:]
    tokens = model.generate(ids, **mask, **GREEDY, assistant_model=DRAFTER, dcut=0.5)
    assert torch.equal(tokens, model.generate(ids, **mask, **GREEDY))


def test_positions_that_plain_generate_would_count_are_fine(
    model: PreTrainedModel, inputs: Inputs, expected: torch.Tensor
) -> None:
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    tokens = model.generate(**inputs, position_ids=positions, **GREEDY, assistant_model=DRAFTER, dcut=0.5)
    assert torch.equal(tokens, expected)


def test_no_prompt_starts_from_the_bos_token(model: PreTrainedModel) -> None:
    assert torch.equal(model.generate(**GREEDY, assistant_model=DRAFTER, dcut=0.5), model.generate(**GREEDY))


def test_left_padding_is_counted_as_in_plain_generate(model: PreTrainedModel, inputs: Inputs) -> None:
    output = model.generate(**inputs, **NAMED, assistant_model=DRAFTER, dcut=0.5, max_length=None)
    assert output.sequences.shape == (3, inputs["input_ids"].shape[1] + 8)
    assert output.stats.finish_reasons == ["length"] * 3
    assert output.stats.prompt_tokens == int(inputs["attention_mask"].sum())


# What is refused.


class Spoil(LogitsProcessor):
    """Makes something of the scores that nobody can choose from.

    Args:
        how: what is made of the scores.
    """

    def __init__(self, how: Callable[[torch.Tensor], torch.Tensor]):
        self.how = how

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.how(scores)


class Locked(LogitsProcessor):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


class Silent(BaseStreamer):
    def put(self, value: torch.Tensor) -> None:
        raise AssertionError("nothing may be streamed before the refusal")

    def end(self) -> None: ...


def random_dflash(model: PreTrainedModel) -> DFlashDrafter:
    shape = {"taps": [0, 2], "mask_token_id": 3, "block_size": 5, "layers": 1, "dtype": model.dtype}
    return DFlashDrafter.random(model.config, **shape)


@dataclass
class Bad:
    """One bad call.

    Attributes:
        says: what the message must hold: the argument, its value and what to do.
        options: what is added to or changed in a good call; None takes an argument away.
        error: its class.
    """

    says: str
    options: dict[str, Any] = field(default_factory=dict)
    error: type[Exception] = ValueError


NO_DRAFTER = {"assistant_model": None}
HOLES = torch.tensor([[1, 0, 1, 1]])

BAD_CALLS = {
    "no drafter": Bad("pass assistant_model=.*or prompt_lookup_num_tokens=10", NO_DRAFTER),
    "our drafter without dcut": Bad("assistant_model is an hf_dcut drafter.*pass dcut=True", {"dcut": None}),
    "our drafter with dcut=False": Bad("assistant_model is an hf_dcut drafter.*pass dcut=True", {"dcut": False}),
    "a drafter by name": Bad("assistant_model is a str.*AutoDrafter", {"assistant_model": "owner/drafter"}, TypeError),
    "no lookup": Bad("draft_tokens=0: give a positive", {**NO_DRAFTER, "prompt_lookup_num_tokens": 0}),
    "no lookup beside a drafter": Bad("draft_tokens=0: give a positive", {"prompt_lookup_num_tokens": 0}),
    "an unknown budget": Bad(r"budget='fats': give 'auto', 'none' or a number in \(0, 1\]", {"dcut": "fats"}),
    "a budget above 1": Bad(r"budget=1.5: give 'auto', 'none' or a number in \(0, 1\]", {"dcut": 1.5}),
    "a budget of 0": Bad(r"budget=0: give 'auto', 'none' or a number in \(0, 1\]", {"dcut": 0}),
    "an unknown key": Bad("no option 'budgte': the options are budget, ratios", {"dcut": {"budgte": 0.5}}),
    "bad ratios": Bad(r"ratios=\(0.5, 1.5\): give .* in \(0, 1\]", {"dcut": {"ratios": (0.5, 1.5)}}),
    "a list": Bad(r"dcut=\[0.5\]: give True, a budget", {"dcut": [0.5]}, TypeError),
    "more than the block": Bad("draft_tokens=5: the drafter makes 4", {"dcut": {"budget": 0.5, "draft_tokens": 5}}),
    "too little memory": Bad(
        r"3 slots of 21 cells take [\d.]+ KiB .* but 1000 bytes are allowed by dcut max_cache_bytes: .* lower max_new",
        {"dcut": {"budget": 0.5, "max_cache_bytes": 1000}},
        MemoryError,
    ),
    "beams": Bad("num_beams=2 .*generate without dcut", {"num_beams": 2}),
    "contrastive search": Bad("penalty_alpha=0.6 .*without dcut", {"penalty_alpha": 0.6}),
    "constraints": Bad("force_words_ids=.*without dcut", {"force_words_ids": [[5]]}),
    "layer contrast": Bad("dola_layers='high' .*without dcut", {"dola_layers": "high"}),
    "no cache": Bad("use_cache=False .*leave use_cache at True", {"use_cache": False}),
    "a static cache": Bad("cache_implementation='static' .*leave it out", {"cache_implementation": "static"}),
    "a paged cache": Bad("cache_implementation='paged' .*leave it out", {"cache_implementation": "paged"}),
    "a quantised cache": Bad("cache_implementation='quantized' .*leave it out", {"cache_implementation": "quantized"}),
    "a cache": Bad(r"past_key_values \(cache\) .*pass the whole prompt", {"cache": DynamicCache()}),
    "stop strings alone": Bad(r"stop_strings=\['x'\] need the tokenizer: pass tokenizer=", {"stop_strings": ["x"]}),
    "a streamer for one": Bad(r"streamer=Silent is for one request .* 3: use hf_dcut.Batch", {"streamer": Silent()}),
    "a processor that drops scores": Bad(
        r"logits_processor \(Spoil\) turned scores of shape \(1, 101\) into \(1, 100\): return the shape it is given",
        {"logits_processor": [Spoil(lambda scores: scores[:, 1:])]},
    ),
    "a processor that adds rows": Bad(
        r"logits_processor \(Spoil\) turned scores of shape \(1, 101\) into \(3, 101\): return the shape",
        {"logits_processor": [Spoil(lambda scores: scores.expand(3, -1))]},
    ),
    "a processor of NaN": Bad(
        "the scores of Spoil, TopKLogitsWarper are no distribution: they hold inf or nan, or ban every token",
        {"logits_processor": [Spoil(lambda scores: scores * math.nan)], "do_sample": True},
        RuntimeError,
    ),
    "every token banned": Bad(
        "the scores of SuppressTokensLogitsProcessor are no distribution: .* ban every token",
        {"suppress_tokens": list(range(101)), "do_sample": True, "top_k": 0},
        RuntimeError,
    ),
    "a processor with a lock": Bad(
        r"logits_processor Locked cannot be copied for each request \(.*lock.*\): pass hf_dcut.PerRequest",
        {"logits_processor": [Locked()]},
        TypeError,
    ),
    "no tokens allowed": Bad("empty list for batch ID", {"prefix_allowed_tokens_fn": lambda row, ids: []}),
    "too few seeds": Bad("seed has 2 entries for 3 requests: give one a request", {"do_sample": True, "seed": [1, 2]}),
    "a broken seed": Bad("seed=1.5: give an integer, or one a request", {"do_sample": True, "seed": 1.5}, TypeError),
    "a seed of a word": Bad("seed='abc': give an integer", {"do_sample": True, "seed": "abc"}, TypeError),
    "true seeds": Bad("seed=.*: give an integer", {"do_sample": True, "seed": [1, 2, True]}, TypeError),
    "two sources of numbers": Bad(
        "seed=1 and generator are two sources of randomness: give one",
        {"do_sample": True, "seed": 1, "generator": torch.Generator()},
    ),
    "no generator": Bad("generator is a int: give a torch.Generator", {"do_sample": True, "generator": 3}, TypeError),
    "unknown proposals": Bad("proposals='drawn': give 'greedy' or 'sampled'", {"dcut": {"proposals": "drawn"}}),
    "proposals of prompt lookup": Bad(
        "proposals='sampled' needs a drafter whose places .* DFlash alone, and this is PromptLookupDrafter: leave",
        {"do_sample": True, "dcut": {"budget": 0.5, "proposals": "sampled"}},
    ),
    "proposals of two": Bad(
        r"proposals='sampled' .* and this is BestOf\(PromptLookupDrafter, PromptLookupDrafter\): leave",
        {"do_sample": True, "prompt_lookup_num_tokens": 3, "dcut": {"budget": 0.5, "proposals": "sampled"}},
    ),
    "an assistant's tokenizer": Bad("assistant_tokenizer does not work with dcut", {"assistant_tokenizer": object()}),
    "hidden states": Bad("output_hidden_states=True .*packed rows", {"output_hidden_states": True}),
    "attentions": Bad("output_attentions=True .*packed rows", {"output_attentions": True}),
    "guidance": Bad("guidance_scale=2.0 .*without dcut", {"guidance_scale": 2.0}),
    "negative prompts": Bad("negative_prompt_ids .*leave it out", {"negative_prompt_ids": torch.ones(3, 2).long()}),
    "another method": Bad("custom_generate .*leave it out", {"custom_generate": "owner/method"}),
    "synced devices": Bad("synced_gpus does not work with dcut.*without dcut", {"synced_gpus": True}),
    "embeddings": Bad("inputs_embeds .*leave it out", {"inputs_embeds": torch.zeros(3, 4, 64).double()}),
    "an unknown keyword": Bad("brand_new", {"brand_new": 1}),
    "positions of pads": Bad(
        "position_ids that do not count from 0.*leave them out", {"position_ids": torch.arange(9)[None].expand(3, 9)}
    ),
}


@pytest.mark.parametrize("bad", BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_calls(model: PreTrainedModel, inputs: Inputs, bad: Bad) -> None:
    options: dict[str, Any] = {**NAMED, "assistant_model": DRAFTER, "dcut": 0.5, **bad.options}
    if "inputs_embeds" in options:
        inputs = {}
    before = dict(vars(model.generation_config))
    with pytest.raises(bad.error, match=bad.says):
        model.generate(**inputs, **options)
    assert vars(model.generation_config) == before


def test_a_model_is_no_drafter(model: PreTrainedModel, inputs: Inputs) -> None:
    with pytest.raises(TypeError, match=r"assistant_model is a LlamaForCausalLM.*AutoDrafter\.from_pretrained"):
        model.generate(**inputs, **GREEDY, assistant_model=model, dcut=0.5)


def test_stop_strings_of_the_models_own_config_are_refused(model: PreTrainedModel, inputs: Inputs) -> None:
    model.generation_config.stop_strings = ["x"]
    with pytest.raises(ValueError, match=r"model.generation_config.stop_strings is set.* pass stop_strings=\.\.\. and"):
        model.generate(**inputs, **GREEDY, assistant_model=DRAFTER, dcut=0.5)


def test_drafts_cannot_be_drawn_under_processors_that_read_ids(model: PreTrainedModel, inputs: Inputs) -> None:
    options = {"do_sample": True, "max_new_tokens": 8, "repetition_penalty": 1.2, "top_k": 0}
    sampled = {"budget": 1.0, "proposals": "sampled"}
    with pytest.raises(
        ValueError, match=r"proposals='sampled' warps .* do not: RepetitionPenaltyLogitsProcessor. Leave"
    ):
        model.generate(**inputs, **options, assistant_model=random_dflash(model), dcut=sampled)


UPSTREAMS = {
    "temperature of 0": {"do_sample": True, "temperature": 0.0},
    "negative temperature": {"do_sample": True, "temperature": -1.0},
    "temperature of NaN": {"do_sample": True, "temperature": math.nan},
    "temperature of a word": {"do_sample": True, "temperature": "hot"},
    "negative top_p": {"do_sample": True, "top_p": -0.1},
    "negative top_k": {"do_sample": True, "top_k": -3},
    "min_p above 1": {"do_sample": True, "min_p": 1.5},
    "top_h above 1": {"do_sample": True, "top_h": 1.5},
    "negative typical_p": {"do_sample": True, "typical_p": -0.5},
    "no penalty": {"repetition_penalty": 0.0},
    "bad words of a word": {"bad_words_ids": "ab"},
    "bias of nothing": {"sequence_bias": []},
    "no tokens": {"max_new_tokens": 0},
    "negative tokens": {"max_new_tokens": -1},
    "a length in the prompt": {"max_new_tokens": None, "max_length": 2},
    "several greedy answers": {"num_return_sequences": 2},
    "an unknown option": {"max_new_token": 5},
}


@pytest.mark.parametrize("options", UPSTREAMS.values(), ids=UPSTREAMS)
def test_upstreams_own_errors(model: PreTrainedModel, inputs: Inputs, options: dict[str, Any]) -> None:
    asked = {**GREEDY, **options}
    errors = []
    for own in ({}, {"assistant_model": DRAFTER, "dcut": 0.5}):
        with pytest.raises(Exception) as caught:  # noqa: PT011 (compared below)
            model.generate(**inputs, **asked, **own)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


ODD = {
    "a temperature near 0": {"do_sample": True, "temperature": 1e-6, "top_k": 0},
    "more new tokens than any": {"min_new_tokens": 9},
    "a minimum above the maximum": {"min_length": 40},
    "two lengths": {"max_length": 4, "max_new_tokens": 8},
    "a length that is passed": {"stopping_criteria": [MaxLengthCriteria(3)]},
    "a length of ones own": {"stopping_criteria": [MaxLengthCriteria(11)]},
    "greedy NaN": {"logits_processor": [Spoil(lambda scores: scores * math.nan)]},
}


@pytest.mark.parametrize("options", ODD.values(), ids=ODD)
@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
def test_odd_options_that_plain_generate_takes(model: PreTrainedModel, inputs: Inputs, options: dict[str, Any]) -> None:
    asked = {**GREEDY, "eos_token_id": 43, **options}
    tokens = model.generate(**inputs, **asked, assistant_model=DRAFTER, dcut=0.5)
    assert torch.equal(tokens, model.generate(**inputs, **asked))


def test_an_interrupt_in_a_processor_leaves_nothing_behind(
    model: PreTrainedModel, inputs: Inputs, expected: torch.Tensor
) -> None:
    drafter, calls = random_dflash(model), []

    def interrupt(scores: torch.Tensor) -> torch.Tensor:
        calls.append([module for module in model.modules() if module._forward_hooks])
        if len(calls) == 9:
            raise KeyboardInterrupt
        return scores

    with pytest.raises(KeyboardInterrupt):
        model.generate(**inputs, **GREEDY, assistant_model=drafter, dcut=0.5, logits_processor=[Spoil(interrupt)])
    assert calls[-1], "it was interrupted while the drafter's hooks were there"
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(model.generate(**inputs, **GREEDY, assistant_model=drafter, dcut=0.5), expected)


BAD_MASKS = {
    "right padding": ([[1, 1, 0, 0], [1, 1, 1, 1]], "plain left padding.*padding_side='left'"),
    "holes": ([[1, 0, 1, 1], [1, 1, 1, 1]], "plain left padding"),
    "an empty row": ([[0, 0, 0, 0], [1, 1, 1, 1]], "plain left padding"),
    "other numbers": ([[2, 2, 2, 2], [1, 1, 1, 1]], "give zeros and ones"),
    "another shape": ([[0, 1, 1], [1, 1, 1]], r"shape \(2, 3\): give zeros and ones in the shape of .*\(2, 4\)"),
    "another shape of ones": ([[1, 1, 1], [1, 1, 1]], r"shape \(2, 3\): give .* in the shape of input_ids, \(2, 4\)"),
}


@pytest.mark.parametrize(("mask", "says"), BAD_MASKS.values(), ids=BAD_MASKS)
def test_bad_masks(model: PreTrainedModel, mask: list[list[int]], says: str) -> None:
    with pytest.raises(ValueError, match=f"attention_mask.*{says}"):
        model.generate(
            torch.full((2, 4), 5), attention_mask=torch.tensor(mask), **GREEDY, assistant_model=DRAFTER, dcut=0.5
        )


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0, 0)])
def test_nothing_to_generate_from(model: PreTrainedModel, shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"input_ids has shape \\({shape[0]}, {shape[1]}\\): give at least one prompt"):
        model.generate(torch.zeros(shape, dtype=torch.int64), **GREEDY, assistant_model=DRAFTER, dcut=0.5)


def test_a_prompt_beyond_the_models_positions(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    model = tiny_llama(max_position_embeddings=8)
    with pytest.raises(ValueError, match="a prompt has 9 tokens but the model has 8 positions: shorten it"):
        model.generate(torch.full((1, 9), 5), **GREEDY, assistant_model=DRAFTER, dcut=0.5)


def test_an_encoder_decoder_model() -> None:
    sizes = {"vocab_size": 101, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    model = AutoModelForSeq2SeqLM.from_config(T5Config(**sizes, decoder_start_token_id=0)).eval()
    with pytest.raises(ValueError, match=r"T5ForConditionalGeneration is an encoder-decoder model.*without dcut"):
        model.generate(torch.full((1, 4), 5), **GREEDY, assistant_model=DRAFTER, dcut=0.5)


def test_a_stateful_model() -> None:
    config = MambaConfig(vocab_size=101, hidden_size=64, num_hidden_layers=1, state_size=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match=r"MambaForCausalLM keeps a recurrent state.*without dcut"):
        model.generate(torch.full((1, 4), 5), **GREEDY, assistant_model=DRAFTER, dcut=0.5)


# A drafter that gives NaN, and one that fails.


@pytest.mark.parametrize("dcut", [0.5, True], ids=str)
def test_a_drafter_that_gives_nan_changes_nothing(
    model: PreTrainedModel,
    inputs: Inputs,
    expected: torch.Tensor,
    stub_drafter: Callable[..., Drafter],
    caplog: pytest.LogCaptureFixture,
    dcut: Any,
) -> None:
    def unsure(batch: Batch) -> Drafts:
        return Drafts.chain(torch.zeros(len(batch), 3, dtype=torch.int64), torch.full((len(batch), 3), math.nan))

    with caplog.at_level(logging.WARNING, "hf_dcut"):
        output = model.generate(**inputs, **NAMED, assistant_model=stub_drafter(3, unsure), dcut=dcut)
    assert torch.equal(output.sequences, expected)
    assert (output.stats.drafted_steps, output.stats.plain_steps) == (0, 7)
    assert len([line for line in caplog.messages if "non-finite confidences" in line]) == len(caplog.messages) == 1


@pytest.mark.parametrize("verb", ["propose", "observe"])
def test_a_drafter_that_fails_changes_nothing(
    model: PreTrainedModel,
    inputs: Inputs,
    expected: torch.Tensor,
    stub_drafter: Callable[..., Drafter],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    verb: str,
) -> None:
    def fail(given: object) -> Drafts:
        assert any(layer._forward_hooks for layer in model.model.layers)
        raise ArithmeticError("in the drafter")

    drafter = stub_drafter(3, fail, taps=(0, 2))
    if verb == "observe":
        monkeypatch.setattr(drafter, "observe", fail)
    with caplog.at_level(logging.WARNING, "hf_dcut"):
        output = model.generate(**inputs, **NAMED, assistant_model=drafter, dcut=0.5)
    assert torch.equal(output.sequences, expected)
    assert (output.stats.drafted_steps, output.stats.plain_steps) == (0, 7)
    (line,) = caplog.messages
    assert f"failed to {verb} (ArithmeticError: in the drafter)" in line
    assert not any(module._forward_hooks for module in model.modules())


def test_an_error_of_our_own_is_not_taken_for_the_drafters(
    model: PreTrainedModel, inputs: Inputs, stub_drafter: Callable[..., Drafter]
) -> None:
    def fail(batch: Batch) -> Drafts:
        raise AssertionError("broken invariant")

    with pytest.raises(AssertionError, match="broken invariant"):
        model.generate(**inputs, **GREEDY, assistant_model=stub_drafter(3, fail), dcut=0.5)
