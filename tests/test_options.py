"""Options that change the text, the scores or the end: with dcut they do what they do in plain `generate`.

Greedy on random float64 models, five ragged prompts, with an oracle that knows the text under the option, so that whole
blocks are accepted under it. Texts must be equal token for token, recorded scores to the last bits of float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
    pipeline,
)

from hf_dcut import DCutOutput, PerRequest
from hf_dcut.drafters.base import Drafter

Inputs = dict[str, torch.Tensor]
ROWS, NEW, D, V, PAD = 5, 24, 6, 101, 0
BUDGETS = ("none", 1.0, 0.4)
# Rows of the plain text hold these at different places.
ENDS = [40, 77]
# float32 rounds the float64 logits of the packed and the padded forward to neighbours at most.
ROUNDING = 1e-6


class BanLast(LogitsProcessor):
    """Never the same token twice in a row: looks at ids, keeps nothing."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


class EveryThird(LogitsProcessor):
    """Allows a third of the tokens, another one at each call, and wants to see one token more each time."""

    def __init__(self, first: int = 0):
        self.calls, self.width = first, None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert self.width in (None, input_ids.shape[1] - 1)
        self.width = input_ids.shape[1]
        self.calls += 1
        return scores.masked_fill(torch.arange(scores.shape[1]) % 3 != self.calls % 3, -torch.inf)


def by_prompt(prompt: int, ids: torch.Tensor) -> list[int]:
    """Allows other tokens to each prompt, and none that the text just held."""
    return [token for token in range(10 + 9 * prompt, 60 + 9 * prompt) if token != ids[-1]]


OPTIONS: dict[str, dict[str, Any]] = {
    "minimum of new tokens": {"min_new_tokens": 20},
    "minimum length": {"min_length": 25},
    "maximum length": {"max_new_tokens": None, "max_length": 20},
    "few new tokens": {"max_new_tokens": 3},
    "other end tokens": {"eos_token_id": [3, 9, 27, 81], "pad_token_id": 50},
    "no end token": {"eos_token_id": None},
    "repetition penalty": {"repetition_penalty": 1.7},
    "repetition reward": {"repetition_penalty": 0.6},
    "prompt repetition penalty": {"encoder_repetition_penalty": 0.4},
    "no bigram twice": {"no_repeat_ngram_size": 2},
    "no token twice": {"no_repeat_ngram_size": 1},
    "no bigram of the prompt": {"encoder_no_repeat_ngram_size": 1},
    "bad words": {"bad_words_ids": [[token] for token in range(20, 40)] + [[41, 42], [60, 61, 62]]},
    "suppressed tokens": {"suppress_tokens": list(range(50, 80))},
    "suppressed first tokens": {"begin_suppress_tokens": list(range(3, 99))},
    "forced last token": {"forced_eos_token_id": 40, "eos_token_id": None},
    "bias": {"sequence_bias": [[[12], 6.0], [[12, 13], 9.0], [[55], -4.0]]},
    "growing wish to end": {"exponential_decay_length_penalty": (4, 1.4)},
    "green list": {"watermarking_config": WatermarkingConfig(bias=4.0)},
    "left hash green list": {"watermarking_config": WatermarkingConfig(seeding_scheme="selfhash", bias=4.0)},
    "tournament": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 1, 4], ngram_len=3)},
    "allowed tokens by prompt": {"prefix_allowed_tokens_fn": by_prompt},
    "a processor that looks at ids": {"logits_processor": [BanLast()]},
    "a processor that counts": {"logits_processor": LogitsProcessorList([EveryThird()])},
    "a processor for each request": {"logits_processor": [PerRequest(lambda row: EveryThird(row))]},
    "several processors": {"logits_processor": [BanLast(), PerRequest(EveryThird)], "repetition_penalty": 1.2},
}
BEGIN = {"begin_suppress_tokens": list(range(3, 99))}
# These change the scores alone, or nothing in a sound model.
SCORES_ONLY: dict[str, dict[str, Any]] = {
    "normalised": {"renormalize_logits": True},
    "no infinities": {"remove_invalid_values": True},
    "infinities and none": {"remove_invalid_values": True, "suppress_tokens": [5], "renormalize_logits": True},
}


def generate(model: PreTrainedModel, inputs: Inputs, **options: Any) -> Any:
    """Returns the output in full. Options are copied, since processors keep what they have seen."""
    records = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    asked = {"do_sample": False, "max_new_tokens": NEW, **records, **options}
    drafter = asked.pop("assistant_model", None)
    return model.generate(**inputs, **copy.deepcopy(asked), assistant_model=drafter)


def lengths(sequences: torch.Tensor, width: int, ends: Sequence[int]) -> list[int]:
    """Returns how many tokens each row has up to its first end token."""
    return [
        next((k for k, token in enumerate(row, start=1) if token in ends), len(row))
        for row in sequences[:, width:].tolist()
    ]


def check_scores(ours: DCutOutput, plain: Any, live: Sequence[int]) -> None:
    """Asserts that scores and logits are those of plain generate, while rows are live."""
    for name in ("scores", "logits"):
        assert len(getattr(ours, name)) == len(getattr(plain, name)) == max(live)
        for column, (own, wanted) in enumerate(zip(getattr(ours, name), getattr(plain, name), strict=True)):
            rows = [row for row, length in enumerate(live) if column < length]
            torch.testing.assert_close(own[rows], wanted[rows], rtol=ROUNDING, atol=ROUNDING)


def check(
    model: PreTrainedModel, inputs: Inputs, knowing: Callable[..., Drafter], budgets: Sequence[Any], **options: Any
) -> Any:
    """Asserts that dcut changes nothing at these budgets; returns the output of plain generate."""
    plain, width = generate(model, inputs, **options), inputs["input_ids"].shape[1]
    drafter = knowing(inputs, plain.sequences, D)
    ends = options.get("eos_token_id", ENDS) or ()
    live = lengths(plain.sequences, width, ends)
    for budget in budgets:
        ours = generate(model, inputs, **options, assistant_model=drafter, dcut=budget)
        assert torch.equal(ours.sequences, plain.sequences)
        check_scores(ours, plain, live)
        last = [row[width + length - 1] for row, length in zip(plain.sequences.tolist(), live, strict=True)]
        assert ours.stats.finish_reasons == ["eos" if token in ends else "length" for token in last]
        if budget != "none":
            assert ours.stats.accepted_tokens > 0
    return plain


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_text_and_scores_are_those_of_plain_generate(
    model: PreTrainedModel, inputs: Inputs, knowing: Callable[..., Drafter], options: dict[str, Any]
) -> None:
    plain = check(model, inputs, knowing, BUDGETS, **options)
    assert not torch.equal(plain.sequences, generate(model, inputs).sequences), "the option does something here"


@pytest.mark.parametrize("options", SCORES_ONLY.values(), ids=SCORES_ONLY)
def test_scores_are_those_of_plain_generate(
    model: PreTrainedModel, inputs: Inputs, knowing: Callable[..., Drafter], options: dict[str, Any]
) -> None:
    check(model, inputs, knowing, BUDGETS, **options)


@pytest.mark.parametrize("options", [{"forced_bos_token_id": 17}, {"forced_bos_token_id": 17, **BEGIN}], ids=str)
def test_a_first_token_can_be_forced_behind_a_single_one(
    model: PreTrainedModel, inputs: Inputs, knowing: Callable[..., Drafter], options: dict[str, Any]
) -> None:
    single = {name: tokens[:, -1:] for name, tokens in inputs.items()}
    plain = check(model, single, knowing, BUDGETS, **options)
    assert (plain.sequences[:, 1] == 17).all()


PAIRED = [
    "minimum of new tokens",
    "repetition penalty",
    "no bigram twice",
    "bad words",
    "bias",
    "growing wish to end",
    "green list",
    "allowed tokens by prompt",
    "a processor for each request",
]


@pytest.mark.parametrize("pair", list(combinations(PAIRED, 2)), ids=" and ".join)
def test_two_options_together(
    model: PreTrainedModel, inputs: Inputs, knowing: Callable[..., Drafter], pair: tuple[str, str]
) -> None:
    check(model, inputs, knowing, (0.4,), **OPTIONS[pair[0]], **OPTIONS[pair[1]])


@pytest.mark.parametrize("drafter", ["none", "wrong"])
def test_a_draft_that_is_never_right_changes_nothing(
    model: PreTrainedModel, inputs: Inputs, knowing: Callable[..., Drafter], drafter: str
) -> None:
    options = {**OPTIONS["several processors"], **OPTIONS["no bigram twice"]}
    plain = generate(model, inputs, **options)
    proposer = knowing(inputs, plain.sequences, D, (0.0,))
    ours = generate(model, inputs, **options, assistant_model=proposer, dcut=1.0 if drafter == "wrong" else "none")
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.stats.accepted_tokens == 0


def test_what_is_not_asked_for_is_not_kept(model: PreTrainedModel, inputs: Inputs) -> None:
    for scores, logits in ((True, False), (False, True), (False, False)):
        output = generate(model, inputs, dcut="none", output_scores=scores, output_logits=logits)
        assert (output.scores is not None, output.logits is not None) == (scores, logits)


def test_transition_scores(model: PreTrainedModel, inputs: Inputs, knowing: Callable[..., Drafter]) -> None:
    options = {"repetition_penalty": 1.3, "eos_token_id": None}
    plain = generate(model, inputs, **options)
    ours = generate(model, inputs, **options, assistant_model=knowing(inputs, plain.sequences, D), dcut=0.4)
    wanted, own = (
        model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
        for output in (plain, ours)
    )
    assert own.shape == (ROWS, NEW)
    torch.testing.assert_close(own, wanted, rtol=ROUNDING, atol=ROUNDING)


def test_ended_rows_are_certain_of_the_pad_token(
    model: PreTrainedModel, inputs: Inputs, knowing: Callable[..., Drafter]
) -> None:
    plain = generate(model, inputs)
    ours = generate(model, inputs, assistant_model=knowing(inputs, plain.sequences, D), dcut=0.4)
    live = lengths(plain.sequences, inputs["input_ids"].shape[1], ENDS)
    assert min(live) < max(live)
    own = model.compute_transition_scores(ours.sequences, ours.scores, normalize_logits=True)
    assert all((own[row, length:] == 0).all() for row, length in enumerate(live))


@pytest.mark.parametrize("how", ["object", "saved"])
def test_a_generation_config(
    model: PreTrainedModel, inputs: Inputs, knowing: Callable[..., Drafter], tmp_path: Path, how: str
) -> None:
    options = {"max_new_tokens": NEW, "no_repeat_ngram_size": 2, "min_new_tokens": 9, "eos_token_id": ENDS}
    config = GenerationConfig(**options, pad_token_id=PAD, do_sample=False, return_dict_in_generate=True)
    plain = model.generate(**inputs, generation_config=config)
    config.dcut = {"budget": 0.4, "draft_tokens": 3}
    if how == "saved":
        config.save_pretrained(tmp_path)
        config = GenerationConfig.from_pretrained(tmp_path)
    before = config.to_dict()
    drafter = knowing(inputs, plain.sequences, D)
    ours = model.generate(**inputs, generation_config=config, assistant_model=drafter)
    assert torch.equal(ours.sequences, plain.sequences)
    assert max(map(max, ours.stats.kept_depths)) == 3
    assert config.to_dict() == before


# Where it ends.


class At(StoppingCriteria):
    """Ends a row that has one of the tokens last. Keeps what it was asked about."""

    def __init__(self, *tokens: int):
        self.tokens, self.asked = torch.tensor(tokens), []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.asked += input_ids.tolist()
        return torch.isin(input_ids[:, -1], self.tokens)


# A row whose text repeats no token early, so that each place of a block can be the first with a token.
OFTEN_NEW = 1


def cut(texts: torch.Tensor, width: int, ends: Callable[[list[int]], bool]) -> list[list[int]]:
    """Returns the rows up to the first new token with which `ends` is true of them, filled with pads to the longest."""
    rows = []
    for row in texts.tolist():
        stop = next((k for k in range(width + 1, len(row) + 1) if ends(row[:k])), len(row))
        rows.append(row[:stop])
    return [row + [PAD] * (max(map(len, rows)) - len(row)) for row in rows]


@pytest.fixture(scope="module")
def endless(model: PreTrainedModel, inputs: Inputs) -> torch.Tensor:
    return model.generate(**inputs, do_sample=False, max_new_tokens=NEW, eos_token_id=None)


def test_a_criterion_at_every_offset_of_a_block(
    model: PreTrainedModel, inputs: Inputs, endless: torch.Tensor, knowing: Callable[..., Drafter]
) -> None:
    width, offsets = inputs["input_ids"].shape[1], set()
    drafter = knowing(inputs, endless, D, (1.0,))
    for place in range(2 * (D + 1) + 1):
        stop = int(endless[OFTEN_NEW, width + place])
        made: dict[int, At] = {}
        ours = model.generate(
            **inputs,
            **{"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "return_dict_in_generate": True},
            stopping_criteria=[PerRequest(lambda row, stop=stop, made=made: made.setdefault(row, At(stop)))],
            assistant_model=drafter,
            dcut=1.0,
        )
        assert ours.sequences.tolist() == cut(endless, width, lambda row, stop=stop: row[-1] == stop)
        # The first token comes with the prompt, then each step commits a block.
        first = endless[OFTEN_NEW, width:].tolist().index(stop)
        offsets.add((first - 1) % (D + 1) if first else None)
        assert ours.stats.finish_reasons[OFTEN_NEW] == "stop"
        # Asked once about each new token of each row, in order, and about none behind the end.
        for row, text in enumerate(endless.tolist()):
            new = text[width:].index(stop) + 1 if ours.finish_reasons[row] == "stop" else NEW
            assert made[row].asked == [text[: width + k] for k in range(1, new + 1)]
    assert offsets == {None, *range(D + 1)}


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_criterion_and_an_end_token(
    model: PreTrainedModel, inputs: Inputs, endless: torch.Tensor, knowing: Callable[..., Drafter], budget: Any
) -> None:
    # With an end token plain generate pads rows that a criterion stopped, so that the outputs can be compared whole.
    width = inputs["input_ids"].shape[1]
    early, late = int(endless[0, width + 5]), int(endless[3, width + 8])
    options = {"stopping_criteria": StoppingCriteriaList([At(early), At(late, 99)])}
    plain = generate(model, inputs, **options)
    ours = generate(model, inputs, **options, assistant_model=knowing(inputs, plain.sequences, D), dcut=budget)
    assert torch.equal(ours.sequences, plain.sequences)
    check_scores(ours, plain, lengths(plain.sequences, width, [early, late, 99, *ENDS]))
    assert ours.stats.finish_reasons == ["stop", "stop", "eos", "stop", "eos"]


class Sure(StoppingCriteria):
    """Ends a row whose last token had an odd score among all so far: reads the recorded scores."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if scores is None:
            return torch.zeros(len(input_ids), dtype=torch.bool)
        best = torch.stack([column.amax(dim=1) for column in scores])
        return (best[-1] == best.amax(dim=0)) & (len(best) > 4)


@pytest.mark.parametrize("records", [True, False])
def test_criteria_read_the_scores_that_plain_generate_shows_them(
    model: PreTrainedModel, inputs: Inputs, knowing: Callable[..., Drafter], records: bool
) -> None:
    options = {"stopping_criteria": [Sure()], "output_scores": records}
    plain = generate(model, inputs, **options)
    ours = generate(model, inputs, **options, assistant_model=knowing(inputs, plain.sequences, D), dcut=0.4)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ("stop" in ours.stats.finish_reasons) == records


@pytest.mark.parametrize("how", ["option", "criterion"])
def test_a_time_limit(model: PreTrainedModel, inputs: Inputs, knowing: Callable[..., Drafter], how: str) -> None:
    for seconds, reason in ((0.0, "stop"), (600.0, "length")):
        limit = {"max_time": seconds} if how == "option" else {"stopping_criteria": [MaxTimeCriteria(seconds)]}
        plain = generate(model, inputs, **limit, eos_token_id=None)
        drafter = knowing(inputs, plain.sequences, D)
        ours = generate(model, inputs, **limit, eos_token_id=None, assistant_model=drafter, dcut=1.0)
        assert torch.equal(ours.sequences, plain.sequences)
        assert ours.stats.finish_reasons == [reason] * ROWS


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One of 101 tokens: three special ones, letters, and pairs and triples of letters, so that texts can overlap."""
    letters = [chr(ord("a") + k) for k in range(26)]
    pairs = [letters[k] + letters[(7 * k + 3) % 26] for k in range(26)] + [letter + letter for letter in letters[:24]]
    words = ["<pad>", "<bos>", "<eos>", "Ġ", *letters, *pairs]
    words += [f"{letters[k]}bc" for k in range(V - len(words))]
    assert len(set(words)) == V
    tokenizer = Tokenizer(models.BPE({word: k for k, word in enumerate(words)}, [], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)


@pytest.mark.parametrize("part", ["whole", "tail and head"])
def test_stop_strings(
    model: PreTrainedModel,
    inputs: Inputs,
    endless: torch.Tensor,
    knowing: Callable[..., Drafter],
    tokenizer: PreTrainedTokenizerFast,
    part: str,
) -> None:
    width, drafter, stopped = inputs["input_ids"].shape[1], knowing(inputs, endless, D), 0
    words = tokenizer.convert_ids_to_tokens(endless[0, width:].tolist())
    strings = words if part == "whole" else [a[-1] + b[0] for a, b in pairwise(words)]
    for k, string in enumerate(dict.fromkeys(strings)):
        given = {"stop_strings": [string, "zzzz"] if k % 2 else string, "tokenizer": tokenizer}
        # An end token that never comes makes plain generate pad the rows that are stopped.
        options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": 2, "pad_token_id": PAD}
        plain = model.generate(**inputs, **options, **given)
        for budget in (1.0, 0.4)[k % 2 :]:
            ours = model.generate(
                **inputs, **options, **given, return_dict_in_generate=True, assistant_model=drafter, dcut=budget
            )
            assert torch.equal(ours.sequences, plain)
            stopped += ours.stats.finish_reasons.count("stop")
    assert stopped > 2 * ROWS


def test_stop_strings_of_a_generation_config(
    model: PreTrainedModel,
    inputs: Inputs,
    endless: torch.Tensor,
    knowing: Callable[..., Drafter],
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    word = tokenizer.convert_ids_to_tokens(int(endless[1, inputs["input_ids"].shape[1] + 5]))
    config = GenerationConfig(
        stop_strings=[word], max_new_tokens=NEW, do_sample=False, eos_token_id=2, pad_token_id=PAD
    )
    plain = model.generate(**inputs, generation_config=config, tokenizer=tokenizer)
    drafter = knowing(inputs, endless, D)
    ours = model.generate(**inputs, generation_config=config, tokenizer=tokenizer, assistant_model=drafter, dcut=0.5)
    assert torch.equal(ours, plain)
    assert config.stop_strings == [word]


# Several answers, and the pipeline.


def test_several_answers_to_a_prompt(model: PreTrainedModel, inputs: Inputs, knowing: Callable[..., Drafter]) -> None:
    def allowed(prompt: int, ids: torch.Tensor) -> list[int]:
        return list(range(3 + 18 * prompt, 21 + 18 * prompt))

    options = {
        **{"do_sample": True, "num_return_sequences": 3, "seed": 5, "top_k": 0, "eos_token_id": None},
        **{"prefix_allowed_tokens_fn": allowed, "max_new_tokens": 9},
    }
    one = model.generate(**inputs, **options, dcut="none")
    width = inputs["input_ids"].shape[1]
    assert one.shape == (3 * ROWS, width + 9)
    assert torch.equal(one[:, :width], inputs["input_ids"].repeat_interleave(3, dim=0))
    for row, text in enumerate(one[:, width:].tolist()):
        assert set(text) <= set(allowed(row // 3, one))
    assert len({tuple(text) for text in one.tolist()}) == 3 * ROWS
    drafter = knowing({name: x.repeat_interleave(3, dim=0) for name, x in inputs.items()}, one, D)
    assert torch.equal(model.generate(**inputs, **options, assistant_model=drafter, dcut=0.5), one)


def test_a_text_generation_pipeline(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, knowing: Callable[..., Drafter]
) -> None:
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu", batch_size=3)
    prompts = ["abcd", "xyz", "hello", "q", "words"]
    options = {"do_sample": False, "max_new_tokens": 12, "return_full_text": False}
    plain = generator(prompts, **options)
    by_lookup = generator(prompts, **options, prompt_lookup_num_tokens=4, dcut=0.5)
    assert by_lookup == plain
    inputs = dict(tokenizer(prompts, return_tensors="pt", padding=True))
    drafter = knowing(inputs, model.generate(**inputs, do_sample=False, max_new_tokens=12), D)
    assert generator(prompts, **options, assistant_model=drafter, dcut=0.5) == plain
    assert len({row[0]["generated_text"] for row in plain}) == len(prompts)
