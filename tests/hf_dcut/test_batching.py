"""Batch jobs: every request as if it were alone, whatever becomes of its neighbours."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.continuous_batching.requests import RequestStatus

import hf_dcut
from hf_dcut import BatchRequest, BatchResult, BestOf, CostTable, PromptLookupDrafter, generate_batch, iterate_batch
from hf_dcut.drafters import DFlashDrafter
from hf_dcut.intake import Intake
from hf_dcut.requests import Totals
from hf_dcut.target import Target

D, END = 3, 40
LOOKUP = PromptLookupDrafter(D)
QUIET = {"progress_bar": False}
Job = dict[str, Any]


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return tiny_llama(eos_token_id=END)


def prompt_of(number: int) -> list[int]:
    """Returns a prompt of 1 to 9 tokens, some of them repeated."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(3, 30, (1 + number * 7 % 9,), generator=generator).tolist()


def alone(model: PreTrainedModel, prompt: list[int], **options: Any) -> list[int]:
    """Returns what `generate` says to this prompt alone."""
    inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt))}
    return model.generate(**inputs, **options)[0, len(prompt) :].tolist()


def greedy(new: int, **options: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=new, do_sample=False, **options)


def mixed(rows: int) -> list[BatchRequest]:
    """Returns requests of mixed lengths, each with options of its own."""
    return [
        BatchRequest(
            prompt_of(n),
            generation_config=greedy(1 + n * 5 % 17, **({"no_repeat_ngram_size": 2} if n % 4 == 0 else {})),
        )
        for n in range(rows)
    ]


# What comes out.


@pytest.mark.parametrize("dcut", ["none", 0.5, 1.0])
@pytest.mark.parametrize("kind", ["prompt lookup", "dflash"])
def test_every_request_says_what_it_says_alone(model: PreTrainedModel, kind: str, dcut: float | str) -> None:
    block = {"taps": [0, 2], "mask_token_id": 3, "block_size": D + 1, "layers": 1, "dtype": torch.float64}
    drafter = LOOKUP if kind == "prompt lookup" else DFlashDrafter.random(model.config, **block)
    requests = mixed(20)
    results = generate_batch(model, requests, assistant_model=drafter, dcut=dcut, max_batch_size=6, **QUIET)
    assert list(results) == [f"req_{n}" for n in range(20)]
    for request, result in zip(requests, results.values(), strict=True):
        text = alone(model, request.input_ids, generation_config=request.generation_config)
        assert (result.generated_tokens, result.prompt_ids) == (text, request.input_ids)
        assert result.finish_reason == ("eos" if text[-1] == END else "length")
        assert (result.error, result.status, result.is_finished()) == (None, RequestStatus.FINISHED, True)
        assert result.totals.steps + result.totals.accepted == len(text) - 1
        assert result.created_time <= result.lifespan[0] <= result.lifespan[1]
        assert result.seconds == result.lifespan[1] - result.lifespan[0]


def test_the_jobs_options_are_those_of_generate(model: PreTrainedModel) -> None:
    prompts = [prompt_of(n) for n in range(4)]
    for options in ({"max_new_tokens": 9, "eos_token_id": None}, {"max_length": 14, "repetition_penalty": 1.4}):
        config = GenerationConfig(do_sample=False, **options)
        results = generate_batch(model, prompts, config, dcut="none", **QUIET)
        assert [r.generated_tokens for r in results.values()] == [
            alone(model, prompt, generation_config=config) for prompt in prompts
        ]
    named = generate_batch(model, prompts, dcut="none", max_new_tokens=9, do_sample=False, eos_token_id=None, **QUIET)
    assert all(len(r.generated_tokens) == 9 for r in named.values()), "eos_token_id=None as for generate"


def test_prompt_lookup_by_its_option(model: PreTrainedModel) -> None:
    run = iterate_batch(
        model, [[5, 6, 7] * 3], dcut=1.0, prompt_lookup_num_tokens=4, max_new_tokens=12, do_sample=False
    )
    (result,) = run
    assert run.stats.drafted_steps > 0
    assert result.generated_tokens == alone(model, [5, 6, 7] * 3, max_new_tokens=12, do_sample=False)


def test_prompt_lookup_joins_the_jobs_drafter(model: PreTrainedModel) -> None:
    options: Job = {"assistant_model": LOOKUP, "prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 1}
    drafter = Intake(model, dcut=0.5, max_new_tokens=9, do_sample=False, **options).drafter
    assert isinstance(drafter, BestOf)
    found = [one.fingerprint() for one in drafter.drafters]
    assert found == [LOOKUP.fingerprint(), PromptLookupDrafter(5, 1).fingerprint()]
    results = generate_batch(model, mixed(8), dcut=0.5, max_batch_size=3, **options, **QUIET)
    for request, result in zip(mixed(8), results.values(), strict=True):
        assert result.generated_tokens == alone(model, request.input_ids, generation_config=request.generation_config)


def test_auto_budget(model: PreTrainedModel) -> None:
    table = CostTable.from_rows({4: {0: 1.0, 4: 1.1, 16: 1.2}}, D)
    results = generate_batch(
        model, mixed(8), assistant_model=LOOKUP, dcut={"cost_table": table}, max_batch_size=4, **QUIET
    )
    for request, result in zip(mixed(8), results.values(), strict=True):
        assert result.generated_tokens == alone(model, request.input_ids, generation_config=request.generation_config)


def test_samples_depend_on_their_seed_alone(model: PreTrainedModel) -> None:
    config = GenerationConfig(max_new_tokens=8, do_sample=True, temperature=1.3, eos_token_id=None)
    requests = [BatchRequest(prompt_of(n), seed=100 + n, generation_config=config) for n in range(9)]
    texts = [
        hf_dcut.generate(model, torch.tensor([r.input_ids]), generation_config=config, dcut="none", seed=r.seed)
        for r in requests
    ]
    for slots, dcut in ((2, "none"), (5, 0.5)):
        results = generate_batch(model, requests, assistant_model=LOOKUP, dcut=dcut, max_batch_size=slots, **QUIET)
        assert [r.prompt_ids + r.generated_tokens for r in results.values()] == [t[0].tolist() for t in texts]


def test_log_probabilities_are_those_of_generate(model: PreTrainedModel) -> None:
    options: Job = {"max_new_tokens": 6, "do_sample": False, "repetition_penalty": 1.3, "output_logprobs": True}
    results = generate_batch(model, [[5, 6], [7]], assistant_model=LOOKUP, dcut=0.5, **options, **QUIET)
    for result in results.values():
        ids = torch.tensor([result.prompt_ids])
        output = model.generate(ids, **options, dcut="none", return_dict_in_generate=True)
        assert result.logprobs == pytest.approx(output.logprobs[0].tolist())
    del options["output_logprobs"]
    assert next(iterate_batch(model, [[5, 6]], dcut="none", **options)).logprobs == []


def test_the_jobs_seed_counts_up(model: PreTrainedModel) -> None:
    options = {"dcut": "none", "max_new_tokens": 6, "do_sample": True, "temperature": 1.5, "eos_token_id": None}
    counted = generate_batch(model, [[5, 6], [7, 8]], seed=7, **options, **QUIET)
    given = generate_batch(model, [BatchRequest([7, 8], seed=8), BatchRequest([5, 6], seed=7)], **options, **QUIET)
    assert counted["req_0"].generated_tokens == given["req_1"].generated_tokens
    assert counted["req_1"].generated_tokens == given["req_0"].generated_tokens


def test_results_come_in_the_order_of_ending_and_the_dict_in_that_of_the_inputs(model: PreTrainedModel) -> None:
    requests = [BatchRequest([5 + n], f"number {n}", greedy(9 - 2 * n, eos_token_id=None)) for n in range(4)]
    order = [result.request_id for result in iterate_batch(model, requests, dcut="none")]
    assert order == ["number 3", "number 2", "number 1", "number 0"]
    assert list(generate_batch(model, requests, dcut="none", **QUIET)) == order[::-1]


def test_the_urgent_come_first(model: PreTrainedModel) -> None:
    requests = [BatchRequest([5 + n], generation_config=greedy(3), priority=n % 3) for n in range(9)]
    order = [result.request_id for result in iterate_batch(model, requests, dcut="none", max_batch_size=1)]
    assert order == [f"req_{n}" for n in (2, 5, 8, 1, 4, 7, 0, 3, 6)]


def test_nothing_comes_of_nothing(model: PreTrainedModel) -> None:
    assert generate_batch(model, [], dcut="none") == {}
    assert list(iterate_batch(model, iter(()), dcut="none", max_length=9)) == []


@pytest.mark.slow
def test_a_thousand_tiny_requests(model: PreTrainedModel) -> None:
    prompts = [[3 + n % 50] for n in range(1000)]
    results = generate_batch(model, prompts, dcut="none", max_new_tokens=1, do_sample=False, max_batch_size=64, **QUIET)
    assert list(results) == [f"req_{n}" for n in range(1000)]
    first = [alone(model, [3 + n], max_new_tokens=1, do_sample=False) for n in range(50)]
    assert [r.generated_tokens for r in results.values()] == first * 20


# One prompt, many answers.


@pytest.mark.parametrize("kind", ["none", "prompt lookup", "dflash"])
def test_a_prompt_is_read_once_for_all_its_answers(model: PreTrainedModel, kind: str) -> None:
    block = {"taps": [0, 2], "mask_token_id": 3, "block_size": D + 1, "layers": 1, "dtype": torch.float64}
    drafter = {"none": None, "prompt lookup": LOOKUP, "dflash": DFlashDrafter.random(model.config, **block)}[kind]
    dcut = "none" if drafter is None else {"budget": 1.0, "max_prefill_tokens": 7}
    config = GenerationConfig(max_new_tokens=9, do_sample=True, num_return_sequences=6, eos_token_id=None)
    prompts = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 10, 11]]
    run = iterate_batch(model, prompts, config, assistant_model=drafter, dcut=dcut, seed=3, max_batch_size=4)
    results = {result.request_id: result for result in run}
    names = [f"req_{n}{child}" for n in (0, 1) for child in ("", *(f"__child#{k}" for k in range(5)))]
    assert set(results) == set(names)
    # The last token of the prompt is read by each for itself: its logits are wanted.
    assert (run.stats.prompt_tokens, run.stats.shared_tokens) == (10 + 5 + 3 + 5, 5 * 9 + 5 * 2)
    for row, name in enumerate(names):
        single = [BatchRequest(results[name].prompt_ids, seed=3 + row, generation_config=single_answer(config))]
        (expected,) = iterate_batch(model, single, assistant_model=drafter, dcut=dcut)
        assert results[name].generated_tokens == expected.generated_tokens
        assert results[name].totals == expected.totals, "what the drafter knows is copied too"


def single_answer(config: GenerationConfig) -> GenerationConfig:
    return GenerationConfig(**{**config.to_diff_dict(), "num_return_sequences": 1})


def test_answers_that_end_at_once_still_share(model: PreTrainedModel) -> None:
    options = {"max_new_tokens": 1, "do_sample": True, "num_return_sequences": 8}
    run = iterate_batch(model, [[5, 6, 7, 8]], dcut="none", max_batch_size=4, **options)
    assert len(list(run)) == 8
    assert run.stats.shared_tokens >= 3 * 6


def test_generate_shares_the_prompt_of_its_answers_too(model: PreTrainedModel) -> None:
    options = {"do_sample": True, "max_new_tokens": 5, "return_dict_in_generate": True, "eos_token_id": None}
    output = model.generate(torch.tensor([[5, 6, 7, 8]]), **options, num_return_sequences=3, dcut="none", seed=1)
    assert (output.stats.prompt_tokens, output.stats.shared_tokens) == (6, 6)
    for row in range(3):
        one = model.generate(torch.tensor([[5, 6, 7, 8]]), **options, dcut="none", seed=1 + row)
        assert torch.equal(one.sequences[0], output.sequences[row])


# Inputs as they come.


def test_inputs_are_taken_as_slots_become_free(model: PreTrainedModel) -> None:
    taken = 0

    def inputs() -> Iterator[list[int]]:
        nonlocal taken
        for n in range(40):
            taken += 1
            yield [5 + n]

    ended = 0
    for _ in iterate_batch(model, inputs(), dcut="none", max_length=9, max_batch_size=3, **greedy(4).to_diff_dict()):
        ended += 1
        assert taken <= ended + 3 * 3, "live, waiting, and ended in the same step"
    assert ended == taken == 40


def test_there_are_no_more_slots_than_sequences(model: PreTrainedModel) -> None:
    run = iterate_batch(model, [[5]], dcut="none", max_new_tokens=4, num_return_sequences=3, do_sample=True)
    assert len(list(run)) == 3
    assert run.stats.slots % 3 == 0
    assert run.stats.cells == 5 * run.stats.slots


def test_stats_are_live(model: PreTrainedModel) -> None:
    with iterate_batch(model, mixed(9), assistant_model=LOOKUP, dcut=0.5, max_batch_size=3) as run:
        seen = [run.stats.new_tokens for _ in run]
    assert seen == sorted(seen)
    assert 0 < seen[0] < seen[-1]
    assert 0 < run.stats.cells_used < run.stats.occupancy <= 1
    assert run.stats.longest_step <= run.stats.seconds


def test_a_run_that_is_left_early_leaves_no_hooks(model: PreTrainedModel) -> None:
    block = {"taps": [0, 2], "mask_token_id": 3, "block_size": D + 1, "layers": 1, "dtype": torch.float64}
    drafter = DFlashDrafter.random(model.config, **block)
    with iterate_batch(model, mixed(9), assistant_model=drafter, dcut=0.5, max_batch_size=3) as run:
        next(run)
        assert any(module._forward_hooks for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    assert list(run) == []


# Requests that fail by themselves.


class Fails(LogitsProcessor):
    """Raises at the n-th token."""

    def __init__(self, after: int, error: BaseException):
        self.left, self.error = after, error

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.left:
            raise self.error
        self.left -= 1
        return scores


def criterion(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
    raise LookupError("in a criterion")


BANS = greedy(5, suppress_tokens=list(range(101)))
BANS.do_sample = True
POISON = {
    "processor": BatchRequest([5, 6], logits_processor=LogitsProcessorList([Fails(2, KeyError("third token"))])),
    "criterion": BatchRequest([5, 6], stopping_criteria=StoppingCriteriaList([criterion])),
    "every token is banned": BatchRequest([5, 6], generation_config=BANS),
    "no tokens": BatchRequest([]),
    "foreign ids": BatchRequest([5, 101]),
    "negative ids": [5, -1],
    "floats": [5.0, 6.0],
    "text": "tokenize me",
    "nothing": None,
    "too long": BatchRequest([5] * 30),
    "beams": BatchRequest([5], generation_config=greedy(3, num_beams=2)),
    "scores": BatchRequest([5], generation_config=greedy(3, output_scores=True, return_dict_in_generate=True)),
    "lookup": BatchRequest([5], generation_config=greedy(3, prompt_lookup_num_tokens=3)),
    "id": BatchRequest([5], request_id=7),  # type: ignore[arg-type]
    "stop strings without a tokenizer": BatchRequest([5], generation_config=greedy(3, stop_strings=["x"])),
}
MESSAGES = {
    "processor": "KeyError: 'third token'",
    "criterion": "LookupError: in a criterion",
    "every token is banned": "no distribution",
    "no tokens": "at least one token",
    "foreign ids": "hold 101, but the model knows the tokens 0 to 100",
    "negative ids": "hold -1",
    "floats": "give token ids",
    "text": "give token ids",
    "nothing": "give token ids",
    "too long": "max_length=25",
    "beams": "num_beams=2 does not work with dcut",
    "scores": "no place in a BatchResult",
    "lookup": "of the whole job",
    "id": "request_id=7",
    "stop strings without a tokenizer": "tokenizer",
}


@pytest.mark.parametrize("poison", POISON)
def test_one_request_fails_alone(model: PreTrainedModel, poison: str) -> None:
    healthy, config = [prompt_of(n) for n in range(8)], GenerationConfig(max_new_tokens=10, do_sample=False)
    inputs = [*healthy[:4], POISON[poison], *healthy[4:]]
    arguments: Job = {"assistant_model": LOOKUP, "dcut": 0.5, "max_batch_size": 3, "max_length": 25}
    results = generate_batch(model, inputs, config, raise_errors=False, **arguments, **QUIET)  # type: ignore[arg-type]
    (wrong,) = [result for result in results.values() if result.error is not None]
    assert list(results).index(wrong.request_id) == 4
    assert MESSAGES[poison] in str(wrong.error)
    assert (wrong.finish_reason, wrong.status) == ("error", RequestStatus.FAILED)
    expected = [alone(model, prompt, generation_config=config) for prompt in healthy]
    assert [r.generated_tokens for r in results.values() if r.error is None] == expected


def test_what_a_request_said_before_it_failed_is_kept(model: PreTrainedModel) -> None:
    poison = BatchRequest([5, 6], logits_processor=LogitsProcessorList([Fails(2, KeyError("third token"))]))
    (result,) = iterate_batch(model, [poison], dcut="none", max_new_tokens=10, do_sample=False)
    assert result.generated_tokens == alone(model, [5, 6], max_new_tokens=2, do_sample=False)


def test_failures_raise_at_the_end_and_nothing_is_lost(model: PreTrainedModel) -> None:
    inputs = [[5], BatchRequest([101], "bad one"), [6], [-1]]
    with pytest.raises(
        hf_dcut.BatchError, match=r"2 of 4 requests failed \(bad one: .*; req_3: .*raise_errors=False"
    ) as info:
        generate_batch(model, inputs, dcut="none", max_new_tokens=3, do_sample=False, **QUIET)
    assert list(info.value.results) == ["req_0", "bad one", "req_2", "req_3"]
    assert len(info.value.results["req_2"].generated_tokens) == 3


def test_ids_that_are_given_twice(model: PreTrainedModel) -> None:
    inputs = [BatchRequest([5], "a"), BatchRequest([6], "a")]
    with pytest.raises(ValueError, match="request_id='a' is given twice"):
        generate_batch(model, inputs, dcut="none", **QUIET)
    first, second = iterate_batch(model, inputs, dcut="none", max_new_tokens=2, do_sample=False)
    assert (first.error, second.error) != (None, None)
    assert "still runs" in str(first.error or second.error)


# What no request could be run with.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size=0: give a positive integer"),
        ({"max_batch_size": True}, "max_batch_size=True"),
        ({"max_length": -1}, "max_length=-1"),
        ({"num_beams": 3}, "num_beams=3 does not work with dcut"),
        ({"max_batchsize": 4}, "max_batchsize"),
        ({"dcut": 0.5}, "dcut needs a drafter"),
        ({"dcut": "most"}, "dcut budget='most'"),
        ({"max_new_tokens": -3}, "max_new_tokens"),
        ({"stop_strings": ["x"]}, "tokenizer"),
    ],
)
def test_a_job_that_cannot_be_run_is_refused_at_once(model: PreTrainedModel, arguments: Job, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        iterate_batch(model, [[5]], **{"dcut": "none", **arguments})


def test_several_greedy_answers(model: PreTrainedModel) -> None:
    with pytest.raises(hf_dcut.BatchError, match="num_return_sequences of a greedy request are all the same"):
        generate_batch(model, [[5]], dcut="none", num_return_sequences=2, max_new_tokens=3, do_sample=False, **QUIET)


def test_wrong_types(model: PreTrainedModel) -> None:
    with pytest.raises(TypeError, match="seed='x'"):
        iterate_batch(model, [[5]], dcut="none", seed="x")
    with pytest.raises(TypeError, match="inputs is a str"):
        generate_batch(model, "text", dcut="none")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="inputs is a generator"):
        generate_batch(model, (p for p in [[5]]), dcut="none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_length=None: the lengths of these inputs are not known"):
        iterate_batch(model, iter([[5]]), dcut="none")


# Accidents.


@pytest.mark.parametrize("where", ["processor", "consumer"])
def test_an_interrupt_keeps_what_had_ended_and_leaves_the_model_alone(model: PreTrainedModel, where: str) -> None:
    block = {"taps": [0, 2], "mask_token_id": 3, "block_size": D + 1, "layers": 1, "dtype": torch.float64}
    drafter = DFlashDrafter.random(model.config, **block)
    before = (model.config.to_dict(), model.generation_config.to_dict(), set(vars(model)))
    stopper = LogitsProcessorList([Fails(8, KeyboardInterrupt())]) if where == "processor" else None
    inputs = [BatchRequest([5 + n], generation_config=greedy(2 + n, eos_token_id=None)) for n in range(6)]
    inputs.append(BatchRequest([5, 6], generation_config=greedy(20, eos_token_id=None), logits_processor=stopper))
    ended: dict[str, BatchResult] = {}
    if where == "processor":
        with pytest.raises(KeyboardInterrupt) as info:
            generate_batch(model, inputs, assistant_model=drafter, dcut=0.5, **QUIET)
        assert isinstance(info.value, hf_dcut.BatchInterrupted)
        ended = info.value.results
    else:
        run = iterate_batch(model, inputs, assistant_model=drafter, dcut=0.5)
        with pytest.raises(KeyboardInterrupt):
            consume(run, ended, most=3)
    assert 0 < len(ended) < 7
    for result in ended.values():
        assert result.generated_tokens == alone(
            model, result.prompt_ids, max_new_tokens=len(result.generated_tokens), do_sample=False, eos_token_id=None
        )
    assert not any(module._forward_hooks for module in model.modules())
    assert (model.config.to_dict(), model.generation_config.to_dict(), set(vars(model))) == before


def consume(run: hf_dcut.BatchRun, ended: dict[str, BatchResult], most: int) -> None:
    """Takes results until it is interrupted."""
    with run:
        for result in run:
            ended[result.request_id] = result
            if len(ended) == most:
                raise KeyboardInterrupt


def short_of_memory(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Lets forwards of more than so many tokens fail, as on a device that is full; returns the sizes tried."""
    forward, sizes = Target.forward, []

    def limited(self: Target, packed: Any, cache: Any) -> Any:
        sizes.append(len(packed))
        if len(packed) > most:
            raise torch.OutOfMemoryError("out of memory")
        return forward(self, packed, cache)

    monkeypatch.setattr(Target, "forward", limited)
    return sizes


@pytest.mark.parametrize("most", [1, 5, 12])
def test_out_of_memory_makes_the_batch_smaller_and_loses_nothing(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, most: int
) -> None:
    requests = mixed(12)
    expected = [alone(model, r.input_ids, generation_config=r.generation_config) for r in requests]
    dcut = {"budget": 0.5} if most > 1 else {"budget": "none"}
    short_of_memory(monkeypatch, most)
    with caplog.at_level(logging.WARNING, "hf_dcut"):
        run = iterate_batch(model, requests, assistant_model=LOOKUP, dcut=dcut, max_batch_size=8)
        results = {result.request_id: result for result in run}
    assert [results[f"req_{n}"].generated_tokens for n in range(12)] == expected
    assert run.stats.evictions > 0
    assert any("out of memory: going on with" in line for line in caplog.messages)


def test_out_of_memory_in_generate(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = torch.tensor([[5, 6, 7], [8, 9, 10], [11, 12, 13], [14, 15, 16]])
    expected = model.generate(inputs, max_new_tokens=9, do_sample=False, eos_token_id=None)
    short_of_memory(monkeypatch, 3)
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(inputs, **options, dcut="none"), expected)
    short_of_memory(monkeypatch, 0)
    with pytest.raises(torch.OutOfMemoryError):
        model.generate(inputs, **options, dcut="none")


def test_a_drafter_that_runs_out_of_memory_gets_smaller_batches(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = type(LOOKUP.bind(model, 1, 9))
    propose = bound.propose

    def limited(self: Any, batch: Any) -> Any:
        if len(batch) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return propose(self, batch)

    monkeypatch.setattr(bound, "propose", limited)
    requests = mixed(8)
    run = iterate_batch(model, requests, assistant_model=LOOKUP, dcut=0.5, max_batch_size=8)
    results = {result.request_id: result for result in run}
    for n, request in enumerate(requests):
        text = alone(model, request.input_ids, generation_config=request.generation_config)
        assert results[f"req_{n}"].generated_tokens == text
    assert run.stats.drafted_steps > 0


def test_requests_wait_for_slots_that_fit_into_memory(model: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    requests = [BatchRequest([5 + n] * 4, generation_config=greedy(6)) for n in range(5)]
    slot = 10 * 3 * 2 * 2 * 16 * 8  # cells, layers, K and V, heads, their width, bytes
    with caplog.at_level(logging.WARNING, "hf_dcut"):
        run = iterate_batch(model, requests, dcut={"budget": "none", "max_cache_bytes": 2 * slot}, max_batch_size=4)
        results = list(run)
    assert "memory holds 2 of 4 slots of 10 cells" in caplog.text
    assert all(r.error is None for r in results)
    with pytest.raises(MemoryError, match="1 slots of 60 cells"):
        list(iterate_batch(model, requests, dcut={"budget": "none", "max_cache_bytes": slot}, max_length=60))


def test_a_request_that_can_never_fit_fails_by_itself(model: PreTrainedModel) -> None:
    slot = 10 * 3 * 2 * 2 * 16 * 8
    inputs = [[5] * 4, BatchRequest([5] * 400, generation_config=greedy(6)), [6] * 3]
    dcut = {"budget": "none", "max_cache_bytes": slot}
    results = generate_batch(model, inputs, dcut=dcut, max_new_tokens=6, do_sample=False, raise_errors=False, **QUIET)
    assert [r.error is None for r in results.values()] == [True, False, True]
    assert "max_length=10" in str(results["req_1"].error)


def test_results_are_transformers_own(model: PreTrainedModel) -> None:
    result = BatchResult("a")
    assert (result.prompt_ids, result.generated_tokens, result.logprobs, result.totals) == ([], [], [], Totals())
    assert isinstance(result, BatchResult.__mro__[1])
    assert BatchResult.__mro__[1].__name__ == "GenerationOutput"
