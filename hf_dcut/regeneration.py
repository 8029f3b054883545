"""Greedy answers of a target, made with the engine: what a drafter learns from and is measured on."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from hf_dcut.assembly import open_engine
from hf_dcut.config import DCutConfig
from hf_dcut.drafters.training.answers import LOOP_NGRAM, LOOP_TIMES, Answer, read_answers, write_answer
from hf_dcut.requests import Request

logger = logging.getLogger(__name__)

Prompt = tuple[int, ...]


class LoopCriteria(StoppingCriteria):
    """Ends an answer where `without_loop` has found enough: some tokens in a row came for the third time.

    Args:
        prompt_tokens: of the text it sees; what the prompt repeats is no loop.
    """

    def __init__(self, prompt_tokens: int):
        self.prompt_tokens = prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs: object) -> Tensor:
        """Returns whether each text loops, bool [texts], for token ids int64 [texts, n]."""
        said = input_ids[:, self.prompt_tokens :]
        if said.shape[1] < LOOP_NGRAM:
            return torch.zeros(len(said), dtype=torch.bool, device=said.device)
        ngrams = said.unfold(1, LOOP_NGRAM, 1)
        return (ngrams == ngrams[:, -1:]).all(-1).sum(-1) >= LOOP_TIMES


def regenerate(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    slots: int = 32,
    keep_loops: bool = True,
) -> Iterator[Answer]:
    """Yields the model's greedy answers as they finish, in any order.

    Args:
        model: the target.
        prompts: token ids, without padding.
        max_new_tokens: of each answer.
        slots: answers in work at once.
        keep_loops: whether an answer goes on once it repeats itself (`LoopCriteria`).
    """
    ends = end_tokens(model)
    requests = [
        Request(
            *(i, list(prompt), max_new_tokens, ends),
            criteria=None if keep_loops else StoppingCriteriaList([LoopCriteria(len(prompt))]),
        )
        for i, prompt in enumerate(prompts)
    ]
    if not requests:
        return
    longest = max(map(len, prompts))
    with open_engine(model, None, DCutConfig(budget="none"), slots, longest, longest + max_new_tokens) as engine:
        for request in engine.run(requests):
            yield Answer((*request.prompt, *request.tokens), len(request.prompt))


class AnswerFile:
    """Answers on disk, added as they come, so that a killed run goes on where it was.

    Args:
        path: a JSON-lines file, made if need be.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._drop_broken_end()
        answers = read_answers(self.path) if self.path.exists() and self.path.stat().st_size else []
        self.known = {answer.ids[: answer.prompt_tokens]: answer for answer in answers}

    def complete(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        slots: int = 32,
        keep_loops: bool = True,
    ) -> Iterator[Answer]:
        """Yields the answers that the file had not, writing each; the arguments are those of `regenerate`."""
        missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self.known]
        with open(self.path, "a", encoding="utf-8") as lines:
            for answer in regenerate(model, missing, max_new_tokens, slots, keep_loops):
                lines.write(write_answer(answer))
                lines.flush()
                self.known[answer.ids[: answer.prompt_tokens]] = answer
                yield answer

    def in_order(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Returns the answers there are to the prompts, in their order: the same however they came."""
        return [self.known[prompt] for prompt in dict.fromkeys(prompts) if prompt in self.known]

    def _drop_broken_end(self) -> None:
        """Takes away the part of a line that a kill left."""
        if not self.path.exists():
            return
        text = self.path.read_bytes()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            logger.warning("%s ends in part of a line, which is dropped: that answer is made again", self.path)
            os.truncate(self.path, whole)


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Returns the ids that end an answer, as the model's generation config has them."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset([ends] if isinstance(ends, int) else ends)
