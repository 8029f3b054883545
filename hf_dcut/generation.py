"""The door to `model.generate(..., dcut=...)`.

`enable()` wraps `GenerationMixin.generate` once. With `dcut`, the wrapper keeps what Transformers would drop on the way
to a custom decoding method (the drafter), and hands a callable to the original `generate`, which prepares inputs,
lengths and options as always. Without `dcut` the call goes through untouched.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, StoppingCriteriaList
from transformers.generation import StopStringCriteria

from hf_dcut import attention, recurrence
from hf_dcut.adapters import unwrapped
from hf_dcut.config import DCutConfig
from hf_dcut.decoding import Decoding
from hf_dcut.drafters.base import Drafter
from hf_dcut.options import check_option, check_parameters
from hf_dcut.padded import DCutOutput
from hf_dcut.preparing import Preparing
from hf_dcut.requests import Request
from hf_dcut.seeds import Seeds

_upstream = GenerationMixin.generate
# Options that the original acts on, or refuses for reasons of its own, before it calls the decoding method.
_EARLY = ("cache_implementation", "token_healing")


def enable() -> None:
    """Makes `generate` of all models understand `dcut`. Called on import."""
    attention.enable()
    GenerationMixin.generate = _generate


def disable() -> None:
    """Puts Transformers' own `generate` back."""
    attention.disable()
    recurrence.disable()
    GenerationMixin.generate = _upstream


def generate(model: PreTrainedModel, *args: Any, dcut: Any = True, **kwargs: Any) -> DCutOutput | Tensor:
    """Returns what `model.generate(..., dcut=dcut)` does; for callers that do not want `generate` wrapped.

    Args:
        model: the target.
        *args: as for `model.generate`.
        **kwargs: as for `model.generate`.
        dcut: True, a budget, a dict or a `DCutConfig`.

    Raises:
        ValueError, TypeError: something that dcut does not do, named.
    """
    named = _named(model, args, kwargs)
    assistant, streamer = named.pop("assistant_model", None), named.pop("streamer", None)
    try:
        model, config = unwrapped(model), DCutConfig.of(dcut)
        arguments, method = _redirect(model, named)
        return _upstream(model, **{**arguments, "custom_generate": Decoding(config, assistant, streamer, method)})
    finally:
        if streamer is not None:
            streamer.end()


def prepare(model: PreTrainedModel, *args: Any, **kwargs: Any) -> list[Request]:
    """Returns the requests that `model.generate` would run under dcut, one a row; nothing is generated yet.

    Args:
        model: the target.
        args, kwargs: as for `model.generate`, without drafter and streamer.

    Raises:
        ValueError, TypeError: something that dcut does not do, named.
    """
    arguments, method = _redirect(model, _named(model, args, kwargs))
    return _upstream(model, **{**arguments, "custom_generate": method})


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


def _named(model: PreTrainedModel, args: Any, kwargs: Any) -> dict[str, Any]:
    """Returns the arguments of a call to `generate` by name."""
    named = inspect.signature(_upstream).bind(model, *args, **kwargs).arguments
    del named["self"]
    return named


def _redirect(model: PreTrainedModel, named: dict[str, Any]) -> tuple[dict[str, Any], Preparing]:
    """Returns the arguments for the original `generate`, and a method that has what it would drop on the way there.

    Args:
        model: the target.
        named: the arguments of the call by name.
    """
    options = named.pop("kwargs", {})
    check_parameters({**named, **options})
    seeds = Seeds(options.pop("seed", None), options.pop("generator", None))
    logprobs = options.pop("output_logprobs", None)
    _take_stop_strings(model, named, options)
    _check_early(model, named, options)
    arguments = {**named, **options}
    return arguments, Preparing(seeds, logprobs, _take_lookup(model, arguments))


def _check_early(model: PreTrainedModel, named: dict[str, Any], options: dict[str, Any]) -> None:
    """Raises ValueError for what the original `generate` would not bring to the decoding method."""
    configs = [config for config in (named.get("generation_config"), model.generation_config) if config is not None]
    for name in _EARLY:
        values = [options[name]] if name in options else [getattr(config, name, None) for config in configs]
        check_option(name, next((value for value in values if value is not None), None))
    prompts = options.get("input_ids", named.get("inputs"))
    if isinstance(prompts, Tensor) and not prompts.numel():
        raise ValueError(f"input_ids has shape {tuple(prompts.shape)}: give at least one prompt of at least one token")


def _take_lookup(model: PreTrainedModel, arguments: dict[str, Any]) -> int | None:
    """Takes `prompt_lookup_num_tokens` out of the arguments and returns it; None where the call does not ask for it.

    Transformers refuses the option where it cannot draft itself: for models with recurrent states, several answers.
    """
    config = arguments.get("generation_config") or GenerationConfig()
    lookup: int | None = arguments.get("prompt_lookup_num_tokens", config.prompt_lookup_num_tokens)
    if lookup is None or model.generation_config.prompt_lookup_num_tokens is not None:
        return None
    arguments.pop("prompt_lookup_num_tokens", None)
    if config.prompt_lookup_num_tokens is not None:
        arguments["generation_config"] = config = copy.deepcopy(config)
        config.prompt_lookup_num_tokens = None
    return lookup


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
