"""`Worker`: a target that answers lines: line -> request, requests -> results, tokens -> text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_dcut import BatchRequest, BatchResult, iterate_batch
from hf_dcut.drafters.base import Drafter
from hf_dcut.jobs.models import load_drafter, load_target
from hf_dcut.jobs.options import generation_config
from hf_dcut.jobs.plan import Plan
from hf_dcut.jobs.source import Line


class Refused(ValueError):
    """A line that this target cannot answer. Only its result is an error."""


class Worker:
    """A target with its tokenizer and drafter.

    Args:
        plan: of the job.
        model, tokenizer, drafter: that it names.
    """

    def __init__(self, plan: Plan, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, drafter: Drafter | None):
        self._plan, self._model, self._tokenizer, self._drafter = plan, model, tokenizer, drafter
        # None where a model has no limit of its own.
        self._context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)

    def request(self, line: Line) -> BatchRequest:
        """Returns the request of a line; its id is the line's number.

        Raises:
            Refused: a prompt that is too long or does not fit the chat template.
        """
        ids, options = self._prepare(line)
        return BatchRequest(
            input_ids=ids,
            request_id=str(line.number),
            generation_config=generation_config(options),
            seed=options.get("seed", (self._plan.seed + line.number) % 2**63),
            priority=options.get("priority", 0),
        )

    def longest(self, lines: Iterable[Line]) -> int:
        """Returns the tokens of the longest of these lines, its longest answer included; 1 if all are refused."""
        longest = 1
        for line in lines:
            with suppress(Refused):
                ids, options = self._prepare(line)
                longest = max(longest, len(ids) + options["max_new_tokens"])
        return longest

    def answer(self, requests: Iterable[BatchRequest], longest: int) -> Iterator[BatchResult]:
        """Yields the results as they finish; requests are taken one by one, as there is room.

        Args:
            requests: any number.
            longest: tokens that one of them may have, its answer included.
        """
        with iterate_batch(
            self._model,
            requests,
            assistant_model=self._drafter,
            dcut=self._plan.dcut,
            max_batch_size=self._plan.max_batch_size,
            max_length=longest,
            tokenizer=self._tokenizer,
        ) as run:
            yield from run

    def text(self, tokens: Sequence[int]) -> str:
        """Returns generated tokens as text, without special tokens."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _prepare(self, line: Line) -> tuple[list[int], dict[str, Any]]:
        """Returns a line's prompt as token ids, and its options with those of the job; or raises Refused."""
        options = {"max_new_tokens": self._plan.max_new_tokens, **self._plan.options, **line.options}
        ids = self._encode(line.prompt)
        self._check_length(len(ids), options["max_new_tokens"])
        return ids, options

    def _encode(self, prompt: str | list[dict[str, str]]) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenizer(prompt)["input_ids"]
        if self._tokenizer.chat_template is None:
            raise Refused("the target has no chat template: give 'prompt' instead of 'messages'")
        try:
            return self._tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, enable_thinking=self._plan.thinking, return_dict=False
            )
        except TemplateError as error:
            raise Refused(f"the target's chat template refuses the messages: {error}") from error

    def _check_length(self, prompt: int, new: int) -> None:
        if not prompt:
            raise Refused("the prompt has no tokens")
        if prompt > self._plan.max_prompt_tokens:
            raise Refused(
                f"the prompt has {prompt} tokens, more than --max-prompt-tokens {self._plan.max_prompt_tokens}"
            )
        if self._context is not None and prompt + new > self._context:
            raise Refused(
                f"the prompt has {prompt} tokens, {new} more may follow, and the target's context is {self._context}"
            )


def load(plan: Plan, revisions: dict[str, str], device: torch.device) -> Worker:
    """Returns the worker that a plan names.

    Args:
        plan: of the job.
        revisions: commits of "target" and "drafter" where these are Hub repositories.
        device: where they go.
    """
    model, tokenizer = load_target(plan, revisions.get("target"), device)
    return Worker(plan, model, tokenizer, load_drafter(plan, revisions.get("drafter"), device))
