"""Values of a config.json by name, checked. A missing or impossible one is an error that names it, never a guess."""

from __future__ import annotations

from typing import Any, TypeGuard

Values = dict[str, Any]


def count(values: Values, key: str, default: int | None = None) -> int:
    """Returns a positive integer; `default` where the config has none."""
    value = default if values.get(key) is None else values[key]
    if not is_index(value) or value == 0:
        raise ValueError(f"config.json {key}={value!r}: a positive integer is needed")
    return value


def optional_count(values: Values, key: str) -> int | None:
    """Returns a positive integer, or None where the config has none."""
    return None if values.get(key) is None else count(values, key)


def index(values: Values, key: str) -> int:
    """Returns an integer from 0."""
    value = values.get(key)
    if not is_index(value):
        raise ValueError(f"config.json {key}={value!r}: an integer from 0 is needed")
    return value


def positive(values: Values, key: str, default: float | None = None) -> float:
    """Returns a positive number; `default` where the config has none."""
    value = default if values.get(key) is None else values[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ValueError(f"config.json {key}={value!r}: a positive number is needed")
    return float(value)


def flag(values: Values, key: str) -> bool | None:
    """Returns a truth value, or None where the config has none."""
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"config.json {key}={value!r}: true or false is needed")
    return value


def section(values: Values, key: str) -> Values:
    """Returns the object under `key`; an empty one where the config has none."""
    value = values.get(key)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"config.json {key}={value!r}: an object is needed")
    return value or {}


def is_index(value: object) -> TypeGuard[int]:
    """Returns whether a value is an integer from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
