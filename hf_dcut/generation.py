"""The door to `model.generate(..., dcut=...)`.

`enable()` wraps `GenerationMixin.generate` once. With `dcut`, the wrapper keeps what Transformers would drop on the way
to a custom decoding method (the drafter), and hands a callable to the original `generate`, which prepares inputs,
lengths and options as always. Without `dcut` the call goes through untouched.
"""

from __future__ import annotations

import copy
import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, StopStringCriteria

from hf_dcut import attention
from hf_dcut.assembly import open_engine
from hf_dcut.choosing import reads_scores_alone
from hf_dcut.config import DCutConfig
from hf_dcut.drafters.base import Drafter
from hf_dcut.drafters.prompt_lookup import PromptLookupDrafter
from hf_dcut.options import check_option, check_options, check_parameters
from hf_dcut.processors import Given, criteria_of, processors_of
from hf_dcut.requests import Request
from hf_dcut.seeds import Seeds
from hf_dcut.stats import Stats
from hf_dcut.streaming import check_streamer, listeners
from hf_dcut.target import check_model

_upstream = GenerationMixin.generate
# Options that the original acts on, or refuses for reasons of its own, before it calls the decoding method.
_EARLY = ("cache_implementation", "token_healing")
# What `generate` prepares for every decoder-only model and we either use or rebuild.
_PREPARED = {"attention_mask", "position_ids", "cache", "logits_to_keep", "use_cache"}


@dataclass
class DCutOutput(GenerateDecoderOnlyOutput):
    """What `generate(..., dcut=..., return_dict_in_generate=True)` returns.

    Attributes:
        sequences: int64 [B, P + longest], left-padded prompts and new tokens, padded behind.
        stats: what the steps did.
    """

    stats: Stats | None = None


def enable() -> None:
    """Makes `generate` of all models understand `dcut`. Called on import."""
    attention.enable()
    GenerationMixin.generate = _generate


def disable() -> None:
    """Puts Transformers' own `generate` back."""
    attention.disable()
    GenerationMixin.generate = _upstream


def generate(model: PreTrainedModel, *args: Any, dcut: Any = True, **kwargs: Any) -> DCutOutput | Tensor:
    """Returns what `model.generate(..., dcut=dcut)` does; for callers that do not want `generate` wrapped.

    Args:
        model: the target.
        args, kwargs: as for `model.generate`.
        dcut: True, a budget, a dict or a `DCutConfig`.

    Raises:
        ValueError, TypeError: something that dcut does not do, named.
    """
    named = inspect.signature(_upstream).bind(model, *args, **kwargs).arguments
    del named["self"]
    streamer = named.pop("streamer", None)
    try:
        return _upstream(model, **_redirect(model, named, dcut, streamer))
    finally:
        if streamer is not None:
            streamer.end()


@functools.wraps(_upstream)
def _generate(self: PreTrainedModel, *args: Any, dcut: Any = None, **kwargs: Any) -> Any:
    """Stands in for `GenerationMixin.generate`: with `dcut` ours, without it the original."""
    call = inspect.signature(_upstream).bind(self, *args, **kwargs).arguments
    if dcut is None:
        dcut = getattr(call.get("generation_config"), "dcut", None)
    if dcut is None:
        dcut = getattr(self.generation_config, "dcut", None)
    if dcut is None or dcut is False:
        if isinstance(call.get("assistant_model"), Drafter):
            raise ValueError(
                "assistant_model is an hf_dcut drafter, which plain generate cannot use: pass dcut=True too"
            )
        return _upstream(self, *args, **kwargs)
    return generate(self, *args, dcut=dcut, **kwargs)


def _redirect(model: PreTrainedModel, named: dict[str, Any], dcut: Any, streamer: Any) -> dict[str, Any]:
    """Returns the arguments that make the original `generate` call our decoding method.

    Args:
        model: the target.
        named: the arguments of the call by name.
        dcut: as for `generate`.
        streamer: the user's.
    """
    options = named.pop("kwargs", {})
    check_parameters({**named, **options})
    config, assistant = DCutConfig.of(dcut), named.pop("assistant_model", None)
    seeds = Seeds(options.pop("seed", None), options.pop("generator", None))
    given = Given(named.get("logits_processor"), named.get("prefix_allowed_tokens_fn"))
    _take_stop_strings(model, named, options)
    _check_early(model, named, options)
    return {**named, **options, "custom_generate": _Decoding(config, assistant, seeds, given, streamer)}


def _check_early(model: PreTrainedModel, named: dict[str, Any], options: dict[str, Any]) -> None:
    """Raises ValueError for what the original `generate` would not bring to the decoding method."""
    configs = [config for config in (named.get("generation_config"), model.generation_config) if config is not None]
    for name in _EARLY:
        values = [options[name]] if name in options else [getattr(config, name, None) for config in configs]
        check_option(name, next((value for value in values if value is not None), None))
    prompts = options.get("input_ids", named.get("inputs"))
    if isinstance(prompts, Tensor) and not prompts.numel():
        raise ValueError(f"input_ids has shape {tuple(prompts.shape)}: give at least one prompt of at least one token")


class _Decoding:
    """The decoding method that the original `generate` calls once everything is prepared.

    Its parameters are named as those of Transformers' own methods: other names would be taken out of the user's
    keywords before these are looked at.
    """

    def __init__(self, config: DCutConfig, assistant: object, seeds: Seeds, given: Given, streamer: Any):
        self.config, self.assistant, self.seeds, self.given, self.streamer = config, assistant, seeds, given, streamer

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> DCutOutput | Tensor:
        """Returns the sequences, int64 [B, P + longest]; with stats if `return_dict_in_generate`.

        Args:
            model: the target.
            input_ids: int64 [B, P], left-padded.
            logits_processor, stopping_criteria: made by Transformers from the final config.
            generation_config: final, with special tokens as tensors.
            model_kwargs: what Transformers prepared for the forward, and what the user added to it.
        """
        check_options(generation_config)
        check_model(model)
        check_streamer(self.streamer, len(input_ids))
        _refuse_extras(model_kwargs)
        drafter = _drafter(self.assistant, generation_config, self.config)
        prompts, mask = _prompts(input_ids, model_kwargs), model_kwargs.get("attention_mask")
        processors = processors_of(model, generation_config, logits_processor, self.given, input_ids, mask)
        requests = self._requests(prompts, input_ids.shape[1], generation_config, processors, stopping_criteria)
        _check_proposals(self.config, drafter, requests)
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
        records = bool(generation_config.return_dict_in_generate)
        with open_engine(
            model, drafter, self.config, len(requests), max(map(len, prompts)), longest, records
        ) as engine:
            for request, listener in zip(requests, listeners(self.streamer, input_ids), strict=True):
                request.listener = listener
            for _ in engine.run(requests):
                pass
            stats = engine.stats
        return _output(input_ids, requests, generation_config, stats)

    def _requests(
        self,
        prompts: list[list[int]],
        width: int,
        config: GenerationConfig,
        processors: list[LogitsProcessorList],
        criteria: StoppingCriteriaList,
    ) -> list[Request]:
        """Returns one request a row.

        Args:
            prompts: token ids of each row, without padding.
            width: P, of the padded rows.
            config: final.
            processors: of each row.
            criteria: of all.
        """
        asked, ends, longest = criteria_of(criteria)
        seeds = self.seeds.draw(len(prompts)) if config.do_sample else [0] * len(prompts)
        return [
            Request(
                id=row,
                prompt=prompt,
                # One token at least: a width that is passed already is noticed after the first, as in `generate`.
                max_new_tokens=max(1, longest - width),
                eos=ends,
                seed=seeds[row],
                left_pads=width - len(prompt),
                generation_config=config,
                pad=_pad(config),
                samples=bool(config.do_sample),
                processors=processors[row],
                walks=not reads_scores_alone(processors[row]),
                criteria=asked,
                keeps_scores=bool(config.return_dict_in_generate and config.output_scores),
                keeps_logits=bool(config.return_dict_in_generate and config.output_logits),
            )
            for row, prompt in enumerate(prompts)
        ]


def _take_stop_strings(model: PreTrainedModel, named: dict[str, Any], options: dict[str, Any]) -> None:
    """Turns stop strings into a criterion, since Transformers drops the tokenizer on the way to a custom method."""
    tokenizer = options.pop("tokenizer", None)
    strings = options.pop("stop_strings", None)
    config = named.get("generation_config")
    if strings is None and config is not None and config.stop_strings is not None:
        strings = config.stop_strings
        named["generation_config"] = config = copy.deepcopy(config)
        config.stop_strings = None
    if model.generation_config.stop_strings is not None:
        raise ValueError(
            "model.generation_config.stop_strings is set, which dcut cannot take from there: set it to None and pass "
            "stop_strings=... and tokenizer=... to generate"
        )
    if strings is None:
        return
    if tokenizer is None:
        raise ValueError(f"stop_strings={strings!r} need the tokenizer: pass tokenizer=... to generate as well")
    given = named.get("stopping_criteria") or ()
    named["stopping_criteria"] = StoppingCriteriaList([*given, StopStringCriteria(tokenizer, strings)])


def _drafter(assistant: object, generation_config: GenerationConfig, config: DCutConfig) -> Drafter | None:
    """Returns who proposes: the assistant, or prompt lookup if its option is set; None for plain decoding."""
    lookup = generation_config.prompt_lookup_num_tokens
    if assistant is not None and lookup is not None:
        raise ValueError(f"assistant_model and prompt_lookup_num_tokens={lookup} are two drafters: give one of them")
    if assistant is not None and not isinstance(assistant, Drafter):
        raise TypeError(
            f"assistant_model is a {type(assistant).__name__}, which dcut cannot draft with: give a drafter, such as "
            f"hf_dcut.AutoDrafter.from_pretrained(folder_or_hub_id), or prompt_lookup_num_tokens"
        )
    if config.budget == "none":
        return None
    if lookup is not None:
        return PromptLookupDrafter(lookup, generation_config.max_matching_ngram_size or 2)
    if assistant is None:
        raise ValueError(
            "dcut needs a drafter: pass assistant_model=hf_dcut.AutoDrafter.from_pretrained(folder_or_hub_id) or "
            "prompt_lookup_num_tokens=10, or decode plainly with dcut='none'"
        )
    return assistant


def _check_proposals(config: DCutConfig, drafter: Drafter | None, requests: list[Request]) -> None:
    """Raises ValueError when drafts cannot be sampled as asked; without sampling requests they are greedy anyway."""
    if config.proposals == "greedy" or drafter is None or not requests[0].samples:
        return
    if not drafter.independent:
        raise ValueError(
            f"dcut proposals='sampled' needs a drafter whose places do not depend on each other's draws, such as "
            f"DFlash, and this is a {type(drafter).__name__}: leave proposals at 'greedy'"
        )
    walked = {type(p).__name__ for request in requests if request.walks for p in request.processors or ()}
    if walked:
        raise ValueError(
            f"dcut proposals='sampled' warps drafts by the processors too, which must look at scores alone, and these "
            f"are {', '.join(sorted(walked))}: leave proposals at 'greedy'"
        )


def _refuse_extras(model_kwargs: dict[str, Any]) -> None:
    """Raises ValueError for forward keywords that are not handled, by name."""
    foreign = [name for name, value in model_kwargs.items() if name not in _PREPARED and value is not None]
    if foreign:
        raise ValueError(f"{', '.join(foreign)} does not work with dcut: leave it out, or generate without dcut")
    if getattr(model_kwargs.get("cache"), "_is_user_defined", False):
        raise ValueError(
            "past_key_values (cache) does not work with dcut, which brings its own: pass the whole prompt instead"
        )


def _prompts(input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[list[int]]:
    """Returns the token ids of each row without padding.

    Raises:
        ValueError: no rows, empty rows, a mask that is not left padding, or positions that do not count from 0.
    """
    rows, width = input_ids.shape
    if not rows or not width:
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)}: give at least one prompt of at least one token"
        )
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
    if mask.shape != input_ids.shape or not ((mask == 0) | (mask == 1)).all():
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}: give zeros and ones in the shape of input_ids, "
            f"{tuple(input_ids.shape)}"
        )
    mask = mask.long()
    if (mask.diff(dim=1) < 0).any() or not mask[:, -1].all():
        raise ValueError(
            "attention_mask is not plain left padding: every row must be zeros, then ones. Set "
            "tokenizer.padding_side='left'"
        )
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions.shape[-1] != width:
        # A mask of ones alone arrives as None, but positions were counted from it.
        raise ValueError(
            f"attention_mask or position_ids have shape {tuple(positions.shape)}: give them in the shape of input_ids, "
            f"{tuple(input_ids.shape)}"
        )
    if positions is not None and not torch.equal(positions * mask, ((mask.cumsum(1) - 1) * mask).expand_as(positions)):
        raise ValueError(
            "position_ids that do not count from 0 at each prompt's first token do not work with dcut: leave them out"
        )
    pads = (width - mask.sum(1)).tolist()
    return [row[pad:] for row, pad in zip(input_ids.tolist(), pads, strict=True)]


def _pad(config: GenerationConfig) -> int:
    return 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)


def _output(input_ids: Tensor, requests: list[Request], config: GenerationConfig, stats: Stats) -> DCutOutput | Tensor:
    """Returns the sequences, int64 [B, P + longest], ended rows filled with the pad token; in a dict on request."""
    longest, pad = max(len(request.tokens) for request in requests), _pad(config)
    new = [request.tokens + [pad] * (longest - len(request.tokens)) for request in requests]
    sequences = torch.cat([input_ids, torch.tensor(new, dtype=input_ids.dtype, device=input_ids.device)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    stats.finish_reasons = [request.finish_reason for request in requests]
    return DCutOutput(
        sequences=sequences,
        scores=_columns([request.scores for request in requests], longest, pad) if config.output_scores else None,
        logits=_columns([request.logits for request in requests], longest, pad) if config.output_logits else None,
        stats=stats,
    )


def _columns(kept: list[list[Tensor]], longest: int, pad: int) -> tuple[Tensor, ...]:
    """Returns one float32 [B, V] a generated column, as `generate` does; ended rows are certain of the pad token."""
    certain = torch.full_like(kept[0][0], -torch.inf)
    certain[pad] = 0.0
    return tuple(torch.stack([row[k] if k < len(row) else certain for row in kept]) for k in range(longest))
