"""The names of drafters that commands take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hf_dcut import AutoDrafter, BestOf, PromptLookupDrafter, SuffixDrafter
from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.drafters.names import named_drafter, source_of


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("lookup", None),
        ("owner/drafter", "owner/drafter"),
        ("owner/drafter+lookup", "owner/drafter"),
        ("random+lookup", "random"),
        ("a+b", "a+b"),
        ("a+b+lookup", "a+b"),
        ("my/lookup", "my/lookup"),
        ("my/lookup+lookup", "my/lookup"),
        ("./a+lookup/", "./a+lookup/"),
        ("suffix", None),
        ("owner/drafter+suffix", "owner/drafter"),
    ],
)
def test_what_is_to_be_loaded(name: str, source: str | None) -> None:
    assert source_of(name) == source
    asked: list[str] = []

    def load(given: str) -> PromptLookupDrafter:
        asked.append(given)
        return PromptLookupDrafter(3)

    made = named_drafter(name, load)
    assert asked == ([] if source is None else [source])
    drafters = made.drafters if isinstance(made, BestOf) else (made,)
    alone = source in (None, name)
    assert [drafter.draft_tokens for drafter in drafters] == ([10 if source is None else 3] if alone else [3, 10])


def test_several_stand_beside_one() -> None:
    made = named_drafter("owner/drafter+suffix+lookup", lambda source: PromptLookupDrafter(3))
    assert isinstance(made, BestOf)
    assert [type(drafter) for drafter in made.drafters] == [PromptLookupDrafter, SuffixDrafter, PromptLookupDrafter]
    assert source_of("lookup+suffix") is None


@pytest.mark.parametrize(
    "name", ["", " ", "+lookup", "lookup+lookup", "owner/drafter+lookup+lookup", "suffix+lookup+suffix"]
)
def test_names_of_nothing_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"drafter '.*': give a folder or Hub id, lookup or suffix, or several as"):
        source_of(name)


def test_options_are_of_what_is_read(
    model: PreTrainedModel, make_drafter: Callable[..., DFlashDrafter], tmp_path: Path
) -> None:
    make_drafter(model).model.save_pretrained(tmp_path)
    made = AutoDrafter.named(f"{tmp_path}+lookup", dtype=torch.float16)
    assert isinstance(made, BestOf)
    block, lookup = made.drafters
    assert isinstance(block, DFlashDrafter)
    assert block.model.fc.weight.dtype == torch.float16
    assert isinstance(lookup, PromptLookupDrafter)
    with pytest.raises(FileNotFoundError, match="no/such"):
        AutoDrafter.named("/no/such+lookup")
