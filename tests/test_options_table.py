"""No option is left out: every field and parameter has its treatment, and docs/options.md tells it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from transformers import GenerationConfig, GenerationMixin

from hf_dcut.options import (
    EQUAL,
    INERT,
    LAW,
    OPTIONS,
    OWN,
    PARAMETERS,
    REFUSED,
    Option,
    check_parameters,
    options_table,
)

DOCS = Path(__file__).resolve().parent.parent / "docs" / "options.md"
OURS = {"dcut", "seed", "generator", "tokenizer", "output_logprobs"}


@pytest.mark.parametrize("name", [name for name in vars(GenerationConfig()) if not name.startswith("_")])
def test_every_field_of_the_generation_config_is_classified(name: str) -> None:
    assert OPTIONS[name].treatment in (EQUAL, LAW, OWN, INERT, REFUSED)


@pytest.mark.parametrize("name", [*inspect.signature(GenerationMixin.generate).parameters, *sorted(OURS)])
def test_every_parameter_of_generate_is_classified(name: str) -> None:
    assert PARAMETERS[name].treatment in (EQUAL, OWN, REFUSED)


def test_nothing_is_both(tmp_path: Path) -> None:
    assert not PARAMETERS.keys() & OPTIONS.keys()


@pytest.mark.parametrize("name", [name for name, option in PARAMETERS.items() if option.treatment == REFUSED])
def test_refused_parameters_say_what_to_do(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} does not work with dcut: .*without dcut"):
        check_parameters({name: object()})
    for value in (None, *PARAMETERS[name].neutral):
        check_parameters({name: value})


def test_other_parameters_are_let_through() -> None:
    check_parameters(dict.fromkeys([name for name, option in PARAMETERS.items() if option.treatment != REFUSED], 1))
    check_parameters({})


def test_the_table_names_everything_once() -> None:
    table = options_table()
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    named = [name.strip(" `") for row in rows for name in row.split("|")[1].split(",")]
    assert sorted(named) == sorted([*PARAMETERS, *OPTIONS])
    for row in rows:
        _, names, treatment, remark, _ = row.split("|")
        option = {**PARAMETERS, **OPTIONS}[names.split(",")[0].strip(" `")]
        assert treatment.strip().startswith(option.treatment)
        assert remark.strip() == option.instead


def test_a_bar_would_break_the_table() -> None:
    assert not [name for name, option in {**PARAMETERS, **OPTIONS}.items() if "|" in option.instead]
    assert Option(EQUAL).instead == ""


def test_the_documentation_is_the_table() -> None:
    advice = "write it anew: python -c 'from hf_dcut.options import options_table; print(options_table(), end=\"\")'"
    assert DOCS.read_text(encoding="utf-8") == options_table(), f"docs/options.md is out of date, {advice}"
