"""The door to `model.generate(..., dcut=...)`.

`enable()` wraps `GenerationMixin.generate` once. With `dcut`, the wrapper keeps what Transformers would drop on the way
to a custom decoding method (the drafter), and hands a callable to the original `generate`, which prepares inputs,
lengths and options as always. Without `dcut` the call goes through untouched.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria

from hf_dcut import attention
from hf_dcut.assembly import open_engine
from hf_dcut.config import DCutConfig
from hf_dcut.drafters.base import Drafter
from hf_dcut.drafters.prompt_lookup import PromptLookupDrafter
from hf_dcut.options import check_option, check_options
from hf_dcut.requests import Request
from hf_dcut.stats import Stats
from hf_dcut.target import check_model

_upstream = GenerationMixin.generate
# Options that the original acts on, or refuses for reasons of its own, before it calls the decoding method.
_EARLY = ("cache_implementation", "stop_strings", "token_healing", "num_return_sequences")
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
    options = named.pop("kwargs", {})
    method = _Decoding(DCutConfig.of(dcut), named.pop("assistant_model", None))
    for name in ("streamer", "custom_generate", "negative_prompt_ids", "negative_prompt_attention_mask"):
        if named.get(name) is not None:
            raise ValueError(f"{name} does not work with dcut: leave it out, or generate without dcut")
    if named.get("synced_gpus"):
        raise ValueError("synced_gpus=True does not work with dcut: it is for ZeRO-3 and FSDP, generate without dcut")
    _check_early(model, named, options)
    return _upstream(model, **{**named, "custom_generate": method}, **options)


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

    def __init__(self, config: DCutConfig, assistant: object):
        self.config, self.assistant = config, assistant

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
        _refuse_extras(logits_processor, stopping_criteria, model_kwargs)
        drafter = _drafter(self.assistant, generation_config, self.config)
        requests = _requests(input_ids, model_kwargs, generation_config)
        prompt = max(len(request.prompt) for request in requests)
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
        records = bool(generation_config.return_dict_in_generate)
        with open_engine(model, drafter, self.config, len(requests), prompt, longest, records) as engine:
            for _ in engine.run(requests):
                pass
            stats = engine.stats
        stats.finish_reasons = [request.finish_reason for request in requests]
        sequences = _sequences(input_ids, requests, generation_config._pad_token_tensor)
        return DCutOutput(sequences=sequences, stats=stats) if records else sequences


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


def _refuse_extras(
    processors: LogitsProcessorList, criteria: StoppingCriteriaList, model_kwargs: dict[str, Any]
) -> None:
    """Raises ValueError for processors, criteria and forward keywords that are not handled, by name."""
    foreign = [type(p).__name__ for p in processors]
    foreign += [type(c).__name__ for c in criteria if not isinstance(c, (MaxLengthCriteria, EosTokenCriteria))]
    foreign += [name for name, value in model_kwargs.items() if name not in _PREPARED and value is not None]
    if foreign:
        raise ValueError(f"{', '.join(foreign)} does not work with dcut: leave it out, or generate without dcut")
    if getattr(model_kwargs.get("cache"), "_is_user_defined", False):
        raise ValueError(
            "past_key_values (cache) does not work with dcut, which brings its own: pass the whole prompt instead"
        )


def _requests(input_ids: Tensor, model_kwargs: dict[str, Any], config: GenerationConfig) -> list[Request]:
    """Returns one request a row, its prompt without padding.

    Raises:
        ValueError: a mask that is not left padding, or positions that do not count from 0.
    """
    width = input_ids.shape[1]
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
    if mask.shape != input_ids.shape or ((mask != 0) & (mask != 1)).any():
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
    eos = config._eos_token_tensor
    ends = frozenset(eos.flatten().tolist()) if eos is not None else frozenset()
    pads = (width - mask.sum(1)).tolist()
    return [
        Request(i, row[pad:], config.max_length - width, ends, left_pads=pad, generation_config=config)
        for i, (row, pad) in enumerate(zip(input_ids.tolist(), pads, strict=True))
    ]


def _sequences(input_ids: Tensor, requests: list[Request], pad: Tensor | None) -> Tensor:
    """Returns prompts and new tokens, int64 [B, P + longest], rows that ended early filled with the pad token."""
    longest = max(len(request.tokens) for request in requests)
    filler = 0 if pad is None else int(pad)
    new = [request.tokens + [filler] * (longest - len(request.tokens)) for request in requests]
    return torch.cat([input_ids, torch.tensor(new, dtype=input_ids.dtype, device=input_ids.device)], dim=1)
