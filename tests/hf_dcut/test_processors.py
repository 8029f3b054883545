"""Each request has processors of its own, and those with a state see every committed prefix once, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation import (
    EncoderRepetitionPenaltyLogitsProcessor,
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
)

from hf_dcut import PerRequest
from hf_dcut.drafters.base import Drafter
from hf_dcut.processors import criteria_of, processors_of

Inputs = dict[str, torch.Tensor]
ROWS, NEW, D = 5, 24, 6


class Recording(LogitsProcessor):
    """Bans the last token; keeps the ids it saw."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert len(input_ids) == len(scores) == 1
        self.ids += input_ids.tolist()
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("profile", [(1.0,), (0.0,), (0.2, 0.7, 1.0)])
@pytest.mark.parametrize("budget", ["none", 1.0, 0.4])
def test_every_committed_prefix_is_seen_once_and_no_other(
    model: PreTrainedModel,
    inputs: Inputs,
    knowing: Callable[..., Drafter],
    budget: Any,
    profile: tuple[float, ...],
    samples: bool,
) -> None:
    options = {"do_sample": samples, "max_new_tokens": NEW, "seed": 3, "return_dict_in_generate": True}

    def run(budget: Any, drafter: Drafter | None = None) -> tuple[Any, list[Recording]]:
        made: dict[int, Recording] = {}
        each = [PerRequest(lambda row: made.setdefault(row, Recording()))]
        output = model.generate(**inputs, **options, logits_processor=each, assistant_model=drafter, dcut=budget)
        return output, [made[row] for row in range(ROWS)]

    plain, _ = run("none")
    output, recordings = run(budget, knowing(inputs, plain.sequences, D, profile))
    assert torch.equal(output.sequences, plain.sequences)
    width, ends = inputs["input_ids"].shape[1], (40, 77)
    for text, recording in zip(output.sequences.tolist(), recordings, strict=True):
        count = next((k for k, token in enumerate(text[width:], start=1) if token in ends), NEW)
        assert recording.ids == [text[: width + k] for k in range(count)]


def test_one_for_each_request_works_in_plain_generate_too(model: PreTrainedModel, inputs: Inputs) -> None:
    made: dict[int, Recording] = {}
    options = {"do_sample": False, "max_new_tokens": 5, "eos_token_id": None}
    each = PerRequest(lambda row: made.setdefault(row, Recording()))
    tokens = model.generate(**inputs, **options, logits_processor=[each])
    width = inputs["input_ids"].shape[1]
    assert [made[row].ids for row in range(ROWS)] == [[text[: width + k] for k in range(5)] for text in tokens.tolist()]


def test_a_factory_is_asked_once_a_row() -> None:
    rows: list[int] = []

    def factory(row: int) -> LogitsProcessorList:
        rows.append(row)
        return LogitsProcessorList()  # which is false in a condition

    each = PerRequest(factory)
    for _ in range(3):
        assert each(torch.zeros(2, 4).long(), torch.zeros(2, 9)).shape == (2, 9)
    assert rows == [0, 1]
    assert each.of(1) is not each.of(1)


# The lists of a batch.


def lists(
    model: PreTrainedModel, inputs: Inputs, given: Sequence[Any] = (), allowed: Any = None, **options: Any
) -> tuple[LogitsProcessorList, list[LogitsProcessorList]]:
    """Returns what all requests share and what each walks, from a config as `generate` makes it."""
    config, _ = model._prepare_generation_config(None, max_new_tokens=NEW, max_length=30, **options)
    model._prepare_special_tokens(config, True, device="cpu")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    prepared = model._get_logits_processor(
        config,
        input_ids_seq_length=ids.shape[1],
        encoder_input_ids=ids,
        prefix_allowed_tokens_fn=allowed,
        logits_processor=LogitsProcessorList(given),
        device="cpu",
        model_kwargs={"attention_mask": mask},
    )
    return processors_of(prepared, len(ids))


def kinds(processors: Sequence[Any]) -> list[str]:
    return [type(processor).__name__ for processor in processors]


def test_what_keeps_no_state_is_shared(model: PreTrainedModel, inputs: Inputs) -> None:
    options = {"do_sample": True, "temperature": 0.5, "repetition_penalty": 1.5, "min_new_tokens": 3, "top_k": 0}
    shared, walked = lists(model, inputs, **options)
    assert kinds(shared) == [
        "RepetitionPenaltyLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "TemperatureLogitsWarper",
    ]
    assert walked == [[]] * ROWS
    assert shared[0].prompt_ignore_length.tolist() == (inputs["attention_mask"] == 0).sum(1).tolist()


def test_from_the_first_that_may_keep_one_on_each_request_has_its_own(model: PreTrainedModel, inputs: Inputs) -> None:
    mine = Recording()
    shared, walked = lists(model, inputs, [mine], repetition_penalty=1.5, do_sample=True, temperature=0.5)
    assert kinds(shared) == ["RepetitionPenaltyLogitsProcessor"]
    assert [kinds(own) for own in walked] == [["Recording", "TemperatureLogitsWarper", "TopKLogitsWarper"]] * ROWS
    assert len({id(own[0]) for own in walked} | {id(mine)}) == ROWS + 1
    assert len({id(own[1]) for own in walked}) == 1, "warpers keep no state"


def test_what_a_batch_has_a_row_of_is_cut_to_the_requests_row(model: PreTrainedModel, inputs: Inputs) -> None:
    mine = [Recording(), EncoderRepetitionPenaltyLogitsProcessor(1.2, inputs["input_ids"])]
    _, walked = lists(model, inputs, mine)
    for row, (_, encoder) in enumerate(walked):
        assert encoder.encoder_input_ids.tolist() == inputs["input_ids"][row : row + 1].tolist()


def test_a_tournament_mark_keeps_a_state(model: PreTrainedModel, inputs: Inputs) -> None:
    mark = SynthIDTextWatermarkingConfig(keys=[3, 1, 4], ngram_len=3)
    shared, walked = lists(model, inputs, watermarking_config=mark)
    assert shared == []
    assert len({id(own[0]) for own in walked}) == ROWS


def test_a_single_request_keeps_the_users_processor(model: PreTrainedModel, inputs: Inputs) -> None:
    mine = Recording()
    one = {name: tokens[:1] for name, tokens in inputs.items()}
    assert lists(model, one, [mine])[1] == [[mine]]


def test_a_users_processor_takes_the_place_of_the_built_in_one(model: PreTrainedModel, inputs: Inputs) -> None:
    shared, _ = lists(model, inputs, [RepetitionPenaltyLogitsProcessor(3.0)], repetition_penalty=1.5)
    assert [processor.penalty for processor in shared] == [3.0]


def test_a_factory_may_make_what_generate_makes_too(model: PreTrainedModel, inputs: Inputs) -> None:
    each = PerRequest(lambda row: RepetitionPenaltyLogitsProcessor(2.0 + row))
    shared, walked = lists(model, inputs, [each], repetition_penalty=1.5)
    assert [processor.penalty for processor in shared] == [1.5], "both are applied, as in plain generate"
    assert [own[0].penalty for own in walked] == [2.0, 3.0, 4.0, 5.0, 6.0]


def test_copies_share_the_models_and_not_the_state(model: PreTrainedModel, inputs: Inputs) -> None:
    class Guided(Recording):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

    made = [own[0] for own in lists(model, inputs, [Guided()])[1]]
    assert all(processor.model is model for processor in made)
    assert len({id(processor.ids) for processor in made}) == ROWS


@pytest.mark.parametrize("how", ["function", "processor"])
@pytest.mark.parametrize("answers", [1, 2, 3])
def test_allowed_tokens_are_asked_for_by_prompt(model: PreTrainedModel, inputs: Inputs, answers: int, how: str) -> None:
    asked = []

    def allowed(prompt: int, ids: torch.Tensor) -> list[int]:
        asked.append((prompt, ids.tolist()))
        return [prompt + 5]

    repeated = {name: tokens.repeat_interleave(answers, dim=0) for name, tokens in inputs.items()}
    options: dict[str, Any] = {"do_sample": True, "num_return_sequences": answers, "top_k": 0}
    if how == "function":
        options["allowed"] = allowed
    else:
        options["given"] = [PrefixConstrainedLogitsProcessor(allowed, answers)]
    shared, walked = lists(model, repeated, **options)
    assert shared == []
    for row, (processor,) in enumerate(walked):
        ids = repeated["input_ids"][row : row + 1]
        assert processor(ids, torch.zeros(1, 101)).argmax() == row // answers + 5
        assert asked[-1] == (row // answers, ids[0].tolist())


class Piecewise(Recording):
    def __init__(self) -> None:
        super().__init__()
        self.pieces = (token for token in range(3))


def test_what_cannot_be_copied(model: PreTrainedModel, inputs: Inputs) -> None:
    says = r"logits_processor Piecewise cannot be copied for each request \(.*generator.*\): pass hf_dcut\.PerRequest"
    with pytest.raises(TypeError, match=says):
        lists(model, inputs, [Piecewise()])
    with pytest.raises(TypeError, match=r"stopping_criteria Locked cannot be copied for each request .*lock"):
        criteria_of(StoppingCriteriaList([MaxLengthCriteria(9), Locked()]), 2)
    one = {name: tokens[:1] for name, tokens in inputs.items()}
    mine, alone = Piecewise(), Locked()
    assert lists(model, one, [mine])[1] == [[mine]]
    assert criteria_of(StoppingCriteriaList([MaxLengthCriteria(9), alone]), 1)[0] == [[alone]]


# Criteria.


class Counting(StoppingCriteria):
    """Ends a row at its third token: keeps a state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return torch.full((len(input_ids),), self.calls == 3)


class Locked(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_ends_and_lengths_are_taken_out_of_the_criteria() -> None:
    never, limit = Counting(), MaxTimeCriteria(5.0)
    prepared = [
        MaxLengthCriteria(20),
        limit,
        EosTokenCriteria([3, 4]),
        never,
        EosTokenCriteria(9),
        MaxLengthCriteria(12),
    ]
    asked, ends, width = criteria_of(StoppingCriteriaList(prepared), 1)
    assert asked == [[limit, never]]
    assert (ends, width) == ({3, 4, 9}, 12)
    asked, ends, width = criteria_of(StoppingCriteriaList([MaxLengthCriteria(7)]), 2)
    assert (asked, ends, width) == ([[], []], frozenset(), 7)


def test_criteria_that_may_keep_a_state_are_each_requests_own() -> None:
    shared, mine = MaxTimeCriteria(5.0), Counting()
    each = PerRequest(lambda row: ("made for", row))
    asked, _, _ = criteria_of(StoppingCriteriaList([MaxLengthCriteria(9), shared, mine, each]), 3)
    assert all(own[0] is shared for own in asked)
    assert len({id(own[1]) for own in asked} | {id(mine)}) == 4
    assert [own[2] for own in asked] == [("made for", row) for row in range(3)]


@pytest.mark.parametrize("how", ["copied", "from a factory"])
@pytest.mark.parametrize("budget", ["none", 1.0, 0.4])
def test_a_criterion_with_a_state_ends_each_request_as_if_it_were_alone(
    model: PreTrainedModel, inputs: Inputs, knowing: Callable[..., Drafter], budget: Any, how: str
) -> None:
    options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": 2}
    text = model.generate(**inputs, **options)
    each = Counting() if how == "copied" else PerRequest(lambda row: Counting())
    tokens = model.generate(
        **inputs, **options, stopping_criteria=[each], assistant_model=knowing(inputs, text, D), dcut=budget
    )
    assert torch.equal(tokens, text[:, : inputs["input_ids"].shape[1] + 3])


@pytest.mark.parametrize("records", [False, True])
def test_a_factory_of_criteria_works_in_plain_generate_too(
    model: PreTrainedModel, inputs: Inputs, records: bool
) -> None:
    class Sure(Counting):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            assert (scores is None) != records
            assert not records or (len(scores), scores[-1].shape) == (self.calls + 1, (1, 101))
            return super().__call__(input_ids, scores)

    asked = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": 2, "return_dict_in_generate": True}
    for dcut in (None, "none"):
        each = PerRequest(lambda row: Sure())
        output = model.generate(**inputs, **asked, output_scores=records, stopping_criteria=[each], dcut=dcut)
        assert output.sequences.shape[1] == inputs["input_ids"].shape[1] + 3


def test_temperature_of_one_is_no_processor(model: PreTrainedModel, inputs: Inputs) -> None:
    assert lists(model, inputs, do_sample=True, temperature=1.0, top_k=0) == ([], [[]] * ROWS)
    assert kinds(lists(model, inputs, do_sample=True, temperature=0.5, top_k=0)[0]) == ["TemperatureLogitsWarper"]
