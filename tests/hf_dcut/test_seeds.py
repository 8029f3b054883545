"""Seeds are integers, one a request, and come from where the user says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hf_dcut.noise import Purpose, noise
from hf_dcut.seeds import Seeds


def test_one_integer_counts_up_over_the_requests() -> None:
    assert Seeds(7).draw(4) == [7, 8, 9, 10]
    assert Seeds(7).draw(0) == []


@pytest.mark.parametrize("seeds", [[3, 1, 4], (3, 1, 4), range(3)], ids=str)
def test_one_a_request(seeds: Sequence[int]) -> None:
    assert Seeds(seeds).draw(3) == list(seeds)


def test_any_integer_is_a_key() -> None:
    odd = [-1, -(2**63), 2**63 - 1, 2**64 + 5, 0]
    drawn = Seeds(odd).draw(5)
    assert all(0 <= seed < 2**63 for seed in drawn)
    assert drawn == [2**63 - 1, 0, 2**63 - 1, 5, 0]
    assert noise(torch.tensor(drawn), torch.zeros(5).long(), Purpose.TARGET).shape == (5,)


def test_a_generator_draws_them() -> None:
    first, again, other = (Seeds(None, torch.Generator().manual_seed(k)).draw(5) for k in (1, 1, 2))
    assert first == again
    assert len({*first, *other}) == 10
    generator = torch.Generator().manual_seed(1)
    assert Seeds(None, generator).draw(5) == first
    assert Seeds(None, generator).draw(5) != first, "the generator goes on"


def test_torchs_global_state_draws_them() -> None:
    torch.manual_seed(3)
    first, second = Seeds().draw(3), Seeds().draw(3)
    torch.manual_seed(3)
    assert (Seeds().draw(3), Seeds().draw(3)) == (first, second)
    assert first != second


def test_seeds_that_are_given_leave_the_global_state_alone() -> None:
    before = torch.random.get_rng_state()
    Seeds(5).draw(3)
    Seeds(None, torch.Generator()).draw(3)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("seed", [1.5, "abc", [1, 2.0, 3], [1, True, 3], True, {1, 2, 3}, torch.arange(3)], ids=str)
def test_what_is_no_seed(seed: Any) -> None:
    with pytest.raises(TypeError, match=r"seed=.*: give an integer, or one a request"):
        Seeds(seed).draw(3)


@pytest.mark.parametrize("rows", [2, 4])
def test_the_wrong_number(rows: int) -> None:
    with pytest.raises(ValueError, match=f"seed has 3 entries for {rows} requests: give one a request, or one integer"):
        Seeds([1, 2, 3]).draw(rows)


def test_two_sources() -> None:
    with pytest.raises(ValueError, match="seed=0 and generator are two sources of randomness: give one of them"):
        Seeds(0, torch.Generator()).draw(3)
    with pytest.raises(TypeError, match=r"generator is a Random: give a torch\.Generator"):
        Seeds(None, random.Random()).draw(3)  # type: ignore[arg-type]
