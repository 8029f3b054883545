"""`Intake`: the settings of a batch job, by which its inputs become requests.

Each input is prepared as `model.generate` alone would prepare it, by the same code, so it may have its own options.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from hf_dcut.adapters import unwrapped
from hf_dcut.assembly import open_engine
from hf_dcut.batch_records import CHILD, BatchRequest, name_of
from hf_dcut.config import DCutConfig
from hf_dcut.decoding import check_proposals, drafter_for
from hf_dcut.engine import Engine
from hf_dcut.generation import prepare
from hf_dcut.lengths import check_length
from hf_dcut.media import MEDIA_INPUTS
from hf_dcut.memory import cells_ahead, fitting_length
from hf_dcut.processors import own_copies
from hf_dcut.ranks import Ranks, settings
from hf_dcut.requests import OWN_FAULTS, Request
from hf_dcut.seeds import Seeds
from hf_dcut.stats import Stats
from hf_dcut.target import Target
from hf_dcut.tiers import reads_scores_alone

AllowedTokens = Callable[[int, Tensor], list[int]]


class Intake:
    """The settings of a batch job; makes requests of inputs, and results of requests.

    Args:
        model: the target.
        generation_config: options of requests that have none of their own.
        assistant_model, dcut: as for `generate`.
        max_batch_size: requests that are live at once; fewer if memory does not hold as many slots.
        max_length: tokens of the longest request that is admitted, prompt and longest answer.
        seed: of sampling: the n-th sequence takes seed + n; from torch's global state when None.
        tokenizer: needed by stop strings.
        logits_processor, stopping_criteria, prefix_allowed_tokens_fn: as for `generate`.
        output_logprobs: whether results hold the log-probability of each token.
        options: fields of `GenerationConfig`, as for `generate`.

    Raises:
        ValueError, TypeError: an argument that no request could be run with.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig | None = None,
        *,
        assistant_model: object = None,
        dcut: Any = True,
        max_batch_size: int = 32,
        max_length: int | None = None,
        seed: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        prefix_allowed_tokens_fn: AllowedTokens | None = None,
        output_logprobs: bool = False,
        **options: Any,
    ):
        check_count("max_batch_size", max_batch_size)
        if max_length is not None:
            check_count("max_length", max_length)
        if not isinstance(output_logprobs, bool):
            raise TypeError(f"output_logprobs={output_logprobs!r}: give True or False")
        if seed is not None and type(seed) is not int:
            raise TypeError(f"seed={seed!r}: give an integer or None")
        self.model, self.generation_config, self.options = unwrapped(model), generation_config, options
        self.tokenizer, self.seed, self.max_batch_size, self.max_length = tokenizer, seed, max_batch_size, max_length
        self.processors, self.criteria = list(logits_processor or ()), list(stopping_criteria or ())
        self.allowed, self.logprobs = prefix_allowed_tokens_fn, output_logprobs
        self.config, self.ranks = DCutConfig.of(dcut), Ranks.of(self.model)
        self._given: list[object] | None = None
        self.vocabulary = int(self.model.get_input_embeddings().weight.shape[0])
        # Requests with equal options share processors that look at scores alone, which then run on all rows at once.
        self._shared: WeakValueDictionary[str, LogitsProcessorList] = WeakValueDictionary()
        # What is wrong with the job's own settings comes out here, before anything is run.
        trial = self._try(BatchRequest([0]))
        self.drafter = drafter_for(assistant_model, trial.generation_config, self.config)

    @contextmanager
    def open_engine(self, stats: Stats) -> Iterator[Engine]:
        """Gives an engine with as many slots as are wanted and fit."""
        assert self.max_length is not None
        slots, longest = self.max_batch_size, self.max_length
        facts = {
            "inputs": self._given,
            "options": (settings(self.options), settings(self.generation_config), self.seed),
        }
        with open_engine(
            self.model, self.drafter, self.config, slots, 1, longest, stats, fit=True, facts=facts
        ) as engine:
            if self.ranks.size > 1 and self.seed is None:
                self.seed = self.ranks.share(lambda: Seeds().draw(1)[0])
            yield engine

    def fit_to(self, inputs: Sequence[object]) -> None:
        """Takes no more slots than these inputs have sequences, and no longer ones than they need.

        Inputs that cannot be prepared are passed over, and those that no memory holds: they fail by themselves later.
        """
        sizes: dict[int, tuple[GenerationConfig | None, set[int]]] = {}
        sequences = 0
        if self.ranks.size > 1:
            self._given = [_facts(given) for given in inputs]
        for given in inputs:
            one = given if isinstance(given, BatchRequest) else BatchRequest(given)  # type: ignore[arg-type]
            sequences += self._answers(one)
            if hasattr(one.input_ids, "__len__"):
                config = one.generation_config
                sizes.setdefault(id(config), (config, set()))[1].add(len(one.input_ids))
        self.max_batch_size = max(1, min(self.max_batch_size, sequences))
        if self.max_length is None:
            longest = max((self._reach(config, lengths) for config, lengths in sizes.values()), default=1)
            cells = fitting_length(Target(self.model), self.drafter, self.config.max_cache_bytes)
            self.max_length = max(1, min(longest, cells - cells_ahead(self.drafter, self.config)))

    def requests(self, given: object, number: int) -> list[Request]:
        """Returns the requests of an input, one a sequence to be returned.

        Args:
            given: token ids or a `BatchRequest`.
            number: of the input.

        Raises:
            ValueError, TypeError, and what the user's own code raises: it cannot be run.
        """
        one = given if isinstance(given, BatchRequest) else BatchRequest(given)  # type: ignore[arg-type]
        if one.request_id is not None and not (isinstance(one.request_id, str) and one.request_id):
            raise TypeError(f"request_id={one.request_id!r}: give a string that is not empty, or None")
        name, count = name_of(one, number), self._answers(one)
        requests = []
        for child in range(count):
            row = number * count + child
            request = self._prepare(one, self._seed(one, row, child), number, row)
            self._check(request, one)
            request.id, request.name = row, f"{name}{CHILD}{child - 1}" if child else name
            request.isolated, request.priority, request.keeps_logprobs = True, one.priority, self.logprobs
            requests.append(request)
        return requests

    def _seed(self, given: BatchRequest, row: int, child: int) -> int | None:
        if given.seed is not None:
            return given.seed + child
        return None if self.seed is None else self.seed + row

    def _prepare(self, given: BatchRequest, seed: int | None = None, number: int = -1, row: int = -1) -> Request:
        """Returns the request that `generate` would run for this input alone.

        Args:
            given: the input.
            seed: of its sampling.
            number: of the input; -1 for a trial, which leaves out the user's own processors.
            row: of the sequence, as if all inputs were one batch.
        """
        ids = checked_ids(given.input_ids, self.vocabulary)
        config = copy.copy(given.generation_config or self.generation_config)
        options = dict(self.options) if given.generation_config is None else {}
        if config is not None:
            config.num_return_sequences = 1
        if config is None or "num_return_sequences" in options:
            options["num_return_sequences"] = 1
        processors, criteria, allowed = LogitsProcessorList(), StoppingCriteriaList(), None
        if number >= 0:
            alone = self._answers(given) == 1
            processors += own_copies(self.processors, row, "logits_processor")
            processors += own_copies(given.logits_processor or (), row, "logits_processor", alone)
            criteria += own_copies(self.criteria, row, "stopping_criteria")
            criteria += own_copies(given.stopping_criteria or (), row, "stopping_criteria", alone)
            allowed = None if self.allowed is None else partial(_numbered, self.allowed, number)
        inputs = torch.tensor([ids], device=self.model.get_input_embeddings().weight.device)
        (request,) = prepare(
            self.model,
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            generation_config=config,
            logits_processor=processors,
            stopping_criteria=criteria,
            prefix_allowed_tokens_fn=allowed,
            tokenizer=self.tokenizer,
            seed=seed,
            **options,
            **checked_media(given.media or {}),
        )
        if given.logits_processor is None and reads_scores_alone(request.processors or ()):
            key = "" if given.generation_config is None else given.generation_config.to_json_string()
            request.processors = self._shared.setdefault(key, request.processors)
        return request

    def _try(self, given: BatchRequest) -> Request:
        """Returns a request that is not run, only to learn what it would be."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return self._prepare(given)

    def _check(self, request: Request, given: BatchRequest) -> None:
        """Raises ValueError for a request that does not fit the job."""
        own, length = given.generation_config, len(request.prompt)
        check_length(self.model, length, request.reach)
        check_proposals(self.config, self.drafter, request)
        assert self.max_length is not None
        if request.reach > self.max_length:
            raise ValueError(
                f"a prompt of {length} tokens and up to {request.max_new_tokens} new ones do not fit into "
                f"max_length={self.max_length}: shorten it, lower max_new_tokens or raise max_length"
            )
        if request.keeps_scores or request.keeps_logits:
            raise ValueError("output_scores and output_logits have no place in a BatchResult: use generate for them")
        if own is not None and own.prompt_lookup_num_tokens is not None:
            raise ValueError("prompt_lookup_num_tokens is of the whole job: give it there, not to one request")
        if self._answers(given) > 1 and not request.samples:
            raise ValueError("num_return_sequences of a greedy request are all the same: set do_sample=True")

    def _answers(self, given: BatchRequest) -> int:
        """Returns the sequences that an input asks for."""
        own = given.generation_config
        asked = self.options.get("num_return_sequences") if own is None else None
        configs = (own or self.generation_config, self.model.generation_config)
        return int(asked or next((c.num_return_sequences for c in configs if c and c.num_return_sequences), 1))

    def _reach(self, config: GenerationConfig | None, lengths: Iterable[int]) -> int:
        """Returns the tokens of the longest request with one of these prompt lengths; 1 if none can be prepared."""
        for length in sorted(lengths, reverse=True):
            with suppress(*OWN_FAULTS):
                return self._try(BatchRequest([0] * length, generation_config=config)).reach
        return 1


def _facts(given: object) -> tuple[object, ...]:
    """Returns what an input asks for, without objects that print differently in each process."""
    if not isinstance(given, BatchRequest):
        return (given,)
    return given.input_ids, given.request_id, settings(given.generation_config), given.seed, given.priority


def checked_ids(prompt: object, vocabulary: int) -> list[int]:
    """Returns a prompt as a list of token ids.

    Raises:
        TypeError, ValueError: something else than one row of ids below `vocabulary`, or none at all.
    """
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes) or not all(type(i) is int for i in ids):
        raise TypeError(f"input_ids={_short(prompt)}: give token ids, such as tokenizer(text).input_ids")
    if not ids:
        raise ValueError("input_ids are empty: give a prompt of at least one token")
    foreign = [i for i in ids if not 0 <= i < vocabulary]
    if foreign:
        raise ValueError(f"input_ids hold {foreign[0]}, but the model knows the tokens 0 to {vocabulary - 1}")
    return list(ids)


def checked_media(media: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Returns the media of a request; raises ValueError for a keyword that is none of a model's media."""
    foreign = sorted(media.keys() - MEDIA_INPUTS)
    if foreign:
        raise ValueError(
            f"media hold {foreign[0]!r}: give what the processor returned besides input_ids and attention_mask, such "
            f"as pixel_values"
        )
    return media


def check_count(name: str, value: object) -> None:
    """Raises ValueError unless an argument is a positive integer."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: give a positive integer")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def _numbered(allowed: AllowedTokens, number: int, _: int, ids: Tensor) -> list[int]:
    """Returns the tokens allowed next, asked with the input's number instead of the list's own, 0."""
    return allowed(number, ids)
