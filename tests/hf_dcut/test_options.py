"""No field of `GenerationConfig` is ignored in silence."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig

from hf_dcut import options
from hf_dcut.options import EQUAL, INERT, LAW, OPTIONS, OWN, REFUSED, check_option, check_options

FIELDS = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
REFUSALS = [name for name, option in OPTIONS.items() if option.treatment == REFUSED]


def test_every_field_has_its_treatment() -> None:
    assert [name for name in FIELDS if name not in OPTIONS] == []
    assert {option.treatment for option in OPTIONS.values()} == {EQUAL, LAW, OWN, INERT, REFUSED}


def test_what_is_special_without_effect_or_refused_says_why() -> None:
    assert [n for n, option in OPTIONS.items() if option.treatment not in (EQUAL, LAW) and not option.instead] == []


def test_a_default_config_passes() -> None:
    check_options(GenerationConfig())
    check_options(GenerationConfig(max_new_tokens=5, eos_token_id=[1, 2], temperature=0.5, top_k=4))


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_fields_are_named_with_their_value_and_a_way_out(name: str) -> None:
    config = GenerationConfig()
    setattr(config, name, "asked for")
    with pytest.raises(ValueError, match=f"^{name}='asked for' does not work with dcut: .+"):
        check_options(config)


@pytest.mark.parametrize(("name", "value"), [(n, v) for n in REFUSALS for v in (None, *OPTIONS[n].neutral)])
def test_refused_fields_may_ask_for_nothing(name: str, value: Any) -> None:
    config = GenerationConfig()
    setattr(config, name, value)
    check_options(config)


def test_a_field_of_a_later_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not `delitem`, which would put the entry back at the end, and the documentation follows the order.
    monkeypatch.setattr(options, "OPTIONS", {name: option for name, option in OPTIONS.items() if name != "top_k"})
    with pytest.raises(ValueError, match="top_k=4: this version of hf-dcut does not know the option"):
        check_options(GenerationConfig(top_k=4))
    check_option("top_k", None)
