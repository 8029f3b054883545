"""Each request has processors of its own, and those with a state see every committed prefix once, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    TemperatureLogitsWarper,
)

from hf_dcut import PerRequest
from hf_dcut.drafters.base import Drafter
from hf_dcut.processors import Given, criteria_of, processors_of

Inputs = dict[str, torch.Tensor]
ROWS, NEW, D = 5, 24, 6


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return tiny_llama(eos_token_id=[40, 77])


@pytest.fixture(scope="module")
def inputs(make_prompts: Callable[..., Inputs]) -> Inputs:
    return make_prompts(ROWS, seed=4)


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


def lists(model: PreTrainedModel, inputs: Inputs, given: Given, **options: Any) -> list[LogitsProcessorList]:
    """Returns the processors of each request, from a config as `generate` makes it."""
    config, _ = model._prepare_generation_config(None, max_new_tokens=NEW, max_length=30, **options)
    model._prepare_special_tokens(config, True, device="cpu")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    prepared = model._get_logits_processor(
        config,
        input_ids_seq_length=ids.shape[1],
        encoder_input_ids=ids,
        prefix_allowed_tokens_fn=given.allowed,
        logits_processor=given.processors,
        device="cpu",
        model_kwargs={"attention_mask": mask},
    )
    return processors_of(model, config, prepared, given, ids, mask)


def test_a_list_that_looks_at_scores_alone_is_shared(model: PreTrainedModel, inputs: Inputs) -> None:
    made = lists(model, inputs, Given(), do_sample=True, temperature=0.5, top_p=0.9, suppress_tokens=[3])
    assert len({id(own) for own in made}) == 1
    assert len(made) == ROWS
    assert [type(p).__name__ for p in made[0]][1:] == [
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
    ]


def test_other_lists_are_each_requests_own(model: PreTrainedModel, inputs: Inputs) -> None:
    given = Given(LogitsProcessorList([Recording()]))
    made = lists(model, inputs, given, repetition_penalty=1.5, encoder_repetition_penalty=1.2, do_sample=True)
    assert len({id(processor) for own in made for processor in own}) == ROWS * len(made[0])
    pads = (inputs["attention_mask"] == 0).sum(1).tolist()
    for row, own in enumerate(made):
        encoder, penalty, recording, top_k = own
        assert encoder.encoder_input_ids.tolist() == inputs["input_ids"][row : row + 1].tolist()
        assert penalty.prompt_ignore_length.tolist() == [pads[row]]
        assert isinstance(recording, Recording)
        assert recording is not given.processors[0]  # type: ignore[index]
        assert type(top_k).__name__ == "TopKLogitsWarper"


def test_a_single_request_keeps_the_users_processor(model: PreTrainedModel, inputs: Inputs) -> None:
    mine = Recording()
    one = {name: tokens[:1] for name, tokens in inputs.items()}
    ((made,),) = lists(model, one, Given(LogitsProcessorList([mine])))
    assert made is mine


def test_a_users_processor_takes_the_place_of_the_built_in_one(model: PreTrainedModel, inputs: Inputs) -> None:
    given = Given(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(3.0)]))
    for own in lists(model, inputs, given, repetition_penalty=1.5):
        assert [processor.penalty for processor in own] == [3.0]


def test_copies_share_the_models_and_not_the_state(model: PreTrainedModel, inputs: Inputs) -> None:
    class Guided(Recording):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

    made = [own[0] for own in lists(model, inputs, Given(LogitsProcessorList([Guided()])))]
    assert all(processor.model is model for processor in made)
    assert len({id(processor.ids) for processor in made}) == ROWS


@pytest.mark.parametrize("answers", [1, 2, 3])
def test_allowed_tokens_are_asked_for_by_prompt(model: PreTrainedModel, inputs: Inputs, answers: int) -> None:
    asked = []

    def allowed(prompt: int, ids: torch.Tensor) -> list[int]:
        asked.append((prompt, ids.tolist()))
        return [prompt + 5]

    repeated = {name: tokens.repeat_interleave(answers, dim=0) for name, tokens in inputs.items()}
    options = {"do_sample": True, "num_return_sequences": answers, "top_k": 0}
    made = lists(model, repeated, Given(None, allowed), **options)
    for row, (processor,) in enumerate(made):
        ids = repeated["input_ids"][row : row + 1]
        assert processor(ids, torch.zeros(1, 101)).argmax() == row // answers + 5
        assert asked[-1] == (row // answers, ids[0].tolist())


class Piecewise(Recording):
    def __init__(self) -> None:
        super().__init__()
        self.pieces = (token for token in range(3))


@pytest.mark.parametrize(
    ("processor", "error", "says"),
    [
        (PrefixConstrainedLogitsProcessor(lambda row, ids: [1], 1), ValueError, "asks by row: pass prefix_allowed_"),
        (Piecewise(), TypeError, r"Piecewise cannot be copied for each request \(.*generator.*\): pass hf_dcut.PerReq"),
    ],
    ids=["asks by row", "cannot be copied"],
)
def test_processors_that_are_not_copied(
    model: PreTrainedModel, inputs: Inputs, processor: LogitsProcessor, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        lists(model, inputs, Given(LogitsProcessorList([processor])))
    one = {name: tokens[:1] for name, tokens in inputs.items()}
    assert lists(model, one, Given(LogitsProcessorList([processor]))) == [[processor]]


# Criteria.


class Never(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_ends_and_lengths_are_taken_out_of_the_criteria() -> None:
    never, limit = Never(), MaxTimeCriteria(5.0)
    prepared = [
        MaxLengthCriteria(20),
        limit,
        EosTokenCriteria([3, 4]),
        never,
        EosTokenCriteria(9),
        MaxLengthCriteria(12),
    ]
    asked, ends, width = criteria_of(StoppingCriteriaList(prepared))
    assert list(asked) == [limit, never]
    assert (ends, width) == ({3, 4, 9}, 12)
    asked, ends, width = criteria_of(StoppingCriteriaList([MaxLengthCriteria(7)]))
    assert (list(asked), ends, width) == ([], frozenset(), 7)


def test_temperature_of_one_is_no_processor(model: PreTrainedModel, inputs: Inputs) -> None:
    assert lists(model, inputs, Given(), do_sample=True, temperature=1.0, top_k=0) == [[]] * ROWS
    (first, *_) = lists(model, inputs, Given(), do_sample=True, temperature=0.5, top_k=0)
    assert [type(processor) for processor in first] == [TemperatureLogitsWarper]
