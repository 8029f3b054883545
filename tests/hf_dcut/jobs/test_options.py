"""The allow-list of generation options."""

from __future__ import annotations

from typing import Any

import pytest

from hf_dcut.jobs.options import ALLOWED, check, generation_config


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 1),
        ("min_new_tokens", 0),
        ("temperature", 0),
        ("temperature", 0.0),
        ("temperature", 1.5),
        ("top_p", 1),
        ("top_p", 0.01),
        ("top_k", 0),
        ("min_p", 0.0),
        ("repetition_penalty", 1.1),
        ("seed", 2**63 - 1),
        ("priority", -3),
        ("stop", ["a", "b"]),
    ],
)
def test_allowed(name: str, value: Any) -> None:
    check({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", True),
        ("max_new_tokens", 3.0),
        ("max_new_tokens", "8"),
        ("max_new_tokens", None),
        ("min_new_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("seed", -1),
        ("seed", 2**63),
        ("priority", 10**30),
        ("temperature", [1]),
        ("stop", "a"),
        ("stop", []),
        ("stop", [""]),
        ("stop", ["a"] * 17),
    ],
)
def test_refused_by_name_with_what_is_allowed(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"option {name}=") as caught:
        check({name: value})
    assert ALLOWED[name][1] in str(caught.value)


@pytest.mark.parametrize(
    "name", ["temprature", "num_beams", "custom_generate", "assistant_model", "cache_implementation"]
)
def test_what_is_not_listed_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"option '{name}' is not known: the options are max_new_tokens"):
        check({name: 1})


def test_config_holds_these_options_alone() -> None:
    config = generation_config({"max_new_tokens": 5, "top_p": 0.9, "seed": 3, "priority": 1})
    assert config.max_new_tokens == 5
    assert config.top_p == 0.9
    assert config.do_sample is None
    assert not hasattr(config, "seed")
    assert not hasattr(config, "priority")


@pytest.mark.parametrize(("temperature", "samples"), [(0, False), (0.0, False), (0.7, True), (1, True)])
def test_temperature_tells_whether_to_sample(temperature: float, samples: bool) -> None:
    config = generation_config({"temperature": temperature})
    assert config.do_sample is samples
    assert config.temperature == (temperature if samples else None)
