"""Generation options that a line of a job, or its command, may set: an allow-list, each with its check.

A temperature of 0 stands for greedy decoding, any other for sampling. What nobody sets is the target's own default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from transformers import GenerationConfig


def _number(value: object, low: float, high: float = math.inf, open_low: bool = False) -> bool:
    """Returns whether the value is a finite number in [low, high], or in (low, high] if `open_low`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    return (low < value if open_low else low <= value) and value <= high


def _integer(value: object, low: int, high: int = 2**63 - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _texts(value: object) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= 16 and all(isinstance(text, str) and text for text in value)


# Name -> (is this value allowed?, what is allowed).
ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (partial(_integer, low=1), "a positive integer"),
    "min_new_tokens": (partial(_integer, low=0), "an integer of at least 0"),
    "temperature": (partial(_number, low=0), "a number of at least 0, where 0 is greedy"),
    "top_p": (partial(_number, low=0, high=1, open_low=True), "a number in (0, 1]"),
    "top_k": (partial(_integer, low=0), "an integer of at least 0, where 0 is no limit"),
    "min_p": (partial(_number, low=0, high=1), "a number in [0, 1]"),
    "repetition_penalty": (partial(_number, low=0, open_low=True), "a number above 0"),
    "stop": (_texts, "a list of 1 to 16 texts that end the answer"),
    "seed": (partial(_integer, low=0), "an integer from 0 to 2**63 - 1"),
    "priority": (partial(_integer, low=-(2**31), high=2**31), "an integer; larger ones come first"),
}
# These belong to a request, not to its GenerationConfig.
_OF_REQUEST = ("seed", "priority")


def check(options: Mapping[str, Any]) -> None:
    """Raises ValueError for an option that is not on the list, or a value that it cannot have."""
    for name, value in options.items():
        if name not in ALLOWED:
            raise ValueError(f"option {name!r} is not known: the options are {', '.join(ALLOWED)}")
        allowed, what = ALLOWED[name]
        if not allowed(value):
            raise ValueError(f"option {name}={value!r}: give {what}")


def generation_config(options: Mapping[str, Any]) -> GenerationConfig:
    """Returns a config with just these options set, so that the target's defaults fill the rest."""
    values = {name: value for name, value in options.items() if name not in _OF_REQUEST}
    if "stop" in values:
        values["stop_strings"] = values.pop("stop")
    if "temperature" in values:
        values["do_sample"] = values["temperature"] > 0
        if not values["do_sample"]:
            del values["temperature"]
    return GenerationConfig(**values)
