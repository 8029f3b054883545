"""Answers are plain `generate`'s, and a killed run goes on where it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hf_dcut.drafters.training import read_answers
from hf_dcut.drafters.training.answers import LOOP_NGRAM, without_loop
from hf_dcut.regeneration import AnswerFile, LoopCriteria, end_tokens, regenerate

PROMPTS = [(5, 17), (40, 9, 33), (7,), (60, 61, 62, 63)]


@pytest.fixture(scope="module")
def target(make_target: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return make_target("llama")


def said(target: PreTrainedModel, prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(target.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False)[0].tolist())


def test_answers_are_those_of_generate(target: PreTrainedModel) -> None:
    found = {a.ids[: a.prompt_tokens]: a.ids for a in regenerate(target, PROMPTS, 9, slots=2)}
    assert found == {prompt: said(target, prompt) for prompt in PROMPTS}
    assert list(regenerate(target, [], 9)) == []


def test_answers_end_where_they_loop(make_target: Callable[..., PreTrainedModel], target: PreTrainedModel) -> None:
    looping = make_target("llama", initializer_range=0.02, tie_word_embeddings=True)
    for whole in regenerate(looping, PROMPTS, 40):
        prompt, cut = whole.ids[: whole.prompt_tokens], without_loop(whole)
        (ended,) = regenerate(looping, [prompt], 40, keep_loops=False)
        assert without_loop(ended) == cut
        # Eight tokens come for the third time with the last of them, and no token more is asked for.
        assert len(ended) == len(cut) + LOOP_NGRAM < len(whole)
    assert [*regenerate(target, PROMPTS, 40, keep_loops=False)] == [*regenerate(target, PROMPTS, 40)]


def test_what_the_prompt_repeats_is_no_loop() -> None:
    criterion, ngram = LoopCriteria(24), list(range(8))
    scores = torch.zeros(1, 10)
    assert not criterion(torch.tensor([ngram * 3]), scores).any()
    assert not criterion(torch.tensor([ngram * 5]), scores).any()
    assert criterion(torch.tensor([ngram * 6]), scores).all()
    assert not criterion(torch.tensor([[*ngram * 6, 9]]), scores).any()


def test_a_file_goes_on_after_a_kill(target: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "deep" / "answers.jsonl"
    running = AnswerFile(path).complete(target, PROMPTS, 9, slots=1)
    next(running), next(running)
    running.close()
    with open(path, "a") as lines:
        lines.write('{"ids": [1, 2')
    resumed = AnswerFile(path)
    assert "part of a line" in caplog.text
    assert len(list(resumed.complete(target, [*PROMPTS, PROMPTS[0]], 9))) == 2
    whole = AnswerFile(path)
    assert [a.ids for a in whole.in_order(PROMPTS)] == [said(target, prompt) for prompt in PROMPTS]
    assert len(read_answers(path)) == 4
    assert list(whole.complete(target, PROMPTS, 9)) == []


@pytest.mark.parametrize(("ids", "wanted"), [(None, set()), (2, {2}), ([2, 5], {2, 5})])
def test_end_tokens(make_target: Callable[..., PreTrainedModel], ids: object, wanted: set[int]) -> None:
    target = make_target("llama")
    target.generation_config.eos_token_id = ids
    assert end_tokens(target) == wanted
