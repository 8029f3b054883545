"""Lines become requests: templates, options, seeds, limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_dcut.jobs.plan import Plan
from hf_dcut.jobs.source import Line
from hf_dcut.jobs.worker import Refused, Worker, load

Make = Callable[..., Plan]
CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def parts(tiny_folder: Any) -> Worker:
    return load(Plan("in", "out", str(tiny_folder), "lookup"), {}, torch.device("cpu"))


@pytest.fixture
def make_worker(parts: Worker, make_plan: Make) -> Callable[..., Worker]:
    return lambda **fields: Worker(make_plan(**fields), parts._model, parts._tokenizer, parts._drafter)


def text(worker: Worker, line: Line) -> str:
    return worker.text(worker.request(line).input_ids)


def test_raw_prompts_are_taken_as_they_are(make_worker: Callable[..., Worker]) -> None:
    assert text(make_worker(), Line(1, "a", " user: x")) == " user: x"


def test_chats_go_through_the_template_without_thinking(make_worker: Callable[..., Worker]) -> None:
    assert text(make_worker(), Line(1, "a", CHAT)) == "user: Hi\nassistant: "
    assert text(make_worker(thinking=True), Line(1, "a", CHAT)) == "user: Hi\nassistant: <think>"


def test_options_of_the_line_come_before_those_of_the_job(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker(options={"temperature": 0.5, "top_p": 0.9}, max_new_tokens=20)
    config = worker.request(Line(1, "a", "x", {"temperature": 0, "max_new_tokens": 3})).generation_config
    assert (config.do_sample, config.top_p, config.max_new_tokens) == (False, 0.9, 3)
    config = worker.request(Line(1, "a", "x")).generation_config
    assert (config.do_sample, config.temperature, config.max_new_tokens) == (True, 0.5, 20)


def test_seeds_depend_on_the_line_alone(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker(seed=2**63 - 2)
    assert worker.request(Line(1, "a", "x")).seed == 2**63 - 1
    assert worker.request(Line(5, "a", "x")).seed == 3
    assert worker.request(Line(5, "a", "x", {"seed": 8})).seed == 8


def test_ids_of_requests_are_line_numbers(make_worker: Callable[..., Worker]) -> None:
    assert make_worker().request(Line(5, "../../etc", "x", {"priority": 2})).request_id == "5"
    assert make_worker().request(Line(5, "a", "x", {"priority": 2})).priority == 2


@pytest.mark.parametrize(
    ("fields", "prompt", "options", "reason"),
    [
        ({"max_prompt_tokens": 4}, "12345", {}, "5 tokens, more than --max-prompt-tokens 4"),
        ({"max_new_tokens": 500}, "x" * 13, {}, "13 tokens, 500 more may follow, and the target's context is 512"),
        ({"max_new_tokens": 500}, "x" * 510, {"max_new_tokens": 3}, "510 tokens, 3 more"),
        ({}, [{"role": "robot", "content": "x"}], {}, "refuses the messages: no such role"),
    ],
)
def test_refused(
    make_worker: Callable[..., Worker], fields: dict[str, Any], prompt: Any, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        make_worker(**fields).request(Line(1, "a", prompt, options))


def test_limits_are_the_largest_that_go(make_worker: Callable[..., Worker]) -> None:
    assert len(make_worker(max_prompt_tokens=5).request(Line(1, "a", "12345")).input_ids) == 5
    assert make_worker(max_new_tokens=500).request(Line(1, "a", "x" * 12))


def test_longest_is_that_of_lines_that_are_answered(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker(max_prompt_tokens=20, max_new_tokens=30)
    lines = [Line(1, 1, "x" * 5), Line(2, 2, "x" * 21), Line(3, 3, "x" * 20, {"max_new_tokens": 3})]
    assert worker.longest(lines) == 35
    assert worker.longest(lines[1:]) == 23
    assert worker.longest(lines[1:2]) == 1


def test_stop_strings(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker()
    line = Line(1, 1, "abc")
    (whole,) = worker.answer([worker.request(line)], 20)
    word = worker.text(whole.generated_tokens)[3:5]
    (cut,) = worker.answer([worker.request(replace(line, options={"stop": [word]}))], 20)
    assert cut.finish_reason == "stop"
    assert worker.text(cut.generated_tokens) == worker.text(whole.generated_tokens)[: 3 + len(word)]


def test_no_template_says_what_to_give(make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_worker()
    monkeypatch.setattr(worker._tokenizer, "chat_template", None)
    with pytest.raises(Refused, match="no chat template: give 'prompt'"):
        worker.request(Line(1, "a", CHAT))


@pytest.mark.parametrize("drafter", ["lookup", "none"])
def test_answers_are_those_of_plain_generate(
    make_worker: Callable[..., Worker], make_target: Callable[..., PreTrainedModel], drafter: str
) -> None:
    worker = make_worker(drafter=drafter, max_batch_size=3)
    worker._drafter = worker._drafter if drafter == "lookup" else None
    lines = [Line(n, n, "abcab" * n, {"max_new_tokens": 5 * n}) for n in range(1, 8)]
    results = {result.request_id: result for result in worker.answer(map(worker.request, lines), worker.longest(lines))}
    for line in (replace(line, options={**line.options}) for line in lines):
        ids = torch.tensor([worker.request(line).input_ids])
        plain = make_target("llama").generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=line.options["max_new_tokens"]
        )
        assert results[str(line.number)].generated_tokens == plain[0, ids.shape[1] :].tolist()
