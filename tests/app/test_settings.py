from __future__ import annotations

from collections.abc import Callable

import pytest

from hf_dcut.app.settings import Limits, Settings, join_prompts, split_prompts


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ("one\ntwo", ("one", "two")),
        ("  one \n", ("one",)),
        ("one,\nstill one\n\ntwo", ("one,\nstill one", "two")),
        ("one\n \n\n two", ("one", "two")),
        ("", ()),
        ("\n\n", ()),
    ],
)
def test_prompts_are_lines_or_paragraphs(text: str, prompts: tuple[str, ...]) -> None:
    assert split_prompts(text) == prompts


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompts": ("one",)}, "prompts: 1 given, 2 to 32"),
        ({"prompts": ("x",) * 33}, "prompts: 33 given"),
        ({"budget": "none"}, "budget 'none'"),
        ({"budget": 0.0}, "budget=0.0"),
        ({"budget": 1.5}, "budget=1.5"),
        ({"new_tokens": 0}, "new tokens 0: give a number from 1 to 256"),
        ({"new_tokens": 257}, "new tokens 257"),
        ({"sample": True, "temperature": 0.0}, "temperature 0.0"),
        ({"sample": True, "top_p": 0.0}, "top-p 0.0"),
        ({"sample": True, "top_k": -1}, "top-k -1"),
        ({"sample": True, "seed": None}, "seed None"),
    ],
)
def test_what_the_page_does_not_allow_is_named(
    settings: Callable[..., Settings], fields: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        settings(**fields).check(Limits())


def test_sampling_values_do_not_matter_without_sampling(settings: Callable[..., Settings]) -> None:
    settings(temperature=0.0, top_p=0.0).check(Limits())
    assert not settings(temperature=0.5, top_k=3).processors()


def test_processors_come_in_the_order_of_generate(settings: Callable[..., Settings]) -> None:
    made = settings(sample=True, temperature=0.5, top_k=3, top_p=0.9).processors()
    assert [type(p).__name__ for p in made] == [
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
    ]
    assert not settings(sample=True, temperature=1.0, top_k=0, top_p=1.0).processors()


@pytest.mark.parametrize("prompts", [("one", "two"), ("one,\nstill one", "two"), ("def f():\n    return 1", "x\ny")])
def test_joined_prompts_come_apart_again(prompts: tuple[str, ...]) -> None:
    assert split_prompts(join_prompts(prompts)) == prompts


def test_empty_lines_inside_a_prompt_are_left_out() -> None:
    assert split_prompts(join_prompts(["one\n\nstill one", "two"])) == ("one\nstill one", "two")
