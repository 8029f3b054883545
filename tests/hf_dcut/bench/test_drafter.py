"""Drafters by name, and the oracle's profiles, which commit what they are asked to."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from hf_dcut import BestOf, OracleDrafter, PromptLookupDrafter
from hf_dcut.bench.drafter import ORACLE_PROFILE, make_drafter, profile_for
from hf_dcut.drafters.dflash import DFlashDrafter


def committed(confidence: float, depth: int) -> float:
    """Returns tokens of a step, by going through its places: the target's own, and each draft that is reached."""
    tokens, reached = 1.0, 1.0
    for _ in range(depth):
        reached *= confidence
        tokens += reached
    return tokens


@pytest.mark.parametrize("depth", [3, 7, 15])
@pytest.mark.parametrize("share", [0.05, 0.35, 0.9])
def test_a_profile_commits_what_it_is_asked_to(depth: int, share: float) -> None:
    wanted = 1 + share * depth
    profile = profile_for(wanted, depth)
    assert sum(committed(c, depth) for c in profile) / len(profile) == pytest.approx(wanted)
    assert list(profile) == sorted(profile, reverse=True)


def test_the_default_profile() -> None:
    mean = sum(committed(c, 15) for c in ORACLE_PROFILE) / len(ORACLE_PROFILE)
    assert mean == pytest.approx(4.94, abs=0.01)
    assert profile_for(mean) == pytest.approx(ORACLE_PROFILE)


def test_each_kind_may_stand_beside_prompt_lookup(model: PreTrainedModel) -> None:
    kinds = {"random": DFlashDrafter, "oracle": OracleDrafter}
    for name, kind in kinds.items():
        assert isinstance(make_drafter(name, model), kind)
        both = make_drafter(f"{name}+lookup", model)
        assert isinstance(both, BestOf)
        assert [type(drafter) for drafter in both.drafters] == [kind, PromptLookupDrafter]
    assert isinstance(make_drafter("lookup", model), PromptLookupDrafter)


@pytest.mark.parametrize("tokens", [1.0, 16.0, 0.5, float("nan")])
def test_impossible_wishes_are_named(tokens: float) -> None:
    with pytest.raises(ValueError, match="give a number between 1 and D"):
        profile_for(tokens)
