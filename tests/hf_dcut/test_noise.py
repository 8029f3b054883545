"""The generator's own known answers, and what its numbers must not depend on."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from hf_dcut.noise import Purpose, _philox, noise

ONES = 0xFFFFFFFF

# Known answers of philox4x32-10, from the file kat_vectors of Random123: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = _philox([torch.tensor([word]) for word in counter], [torch.tensor([word]) for word in key])
    assert tuple(word.item() for word in words) == expected


def test_numbers_are_made_of_the_first_two_words() -> None:
    high, low = KNOWN[0][2][:2]
    expected = (((high >> 6) << 26 | low >> 6) + 0.5) / 2**52
    assert noise(torch.tensor(0), torch.tensor(0), Purpose.TARGET).item() == expected


def test_numbers_are_uniform() -> None:
    # A true uniform sample strays further than this with probability 1e-6 (Dvoretzky, Kiefer, Wolfowitz).
    count = 20_000
    allowed = math.sqrt(math.log(2 / 1e-6) / (2 * count))
    drawn = noise(torch.tensor(7), torch.arange(count), Purpose.ACCEPT).sort().values
    assert 0 < drawn[0] < drawn[-1] < 1
    below = torch.arange(count + 1, dtype=torch.float64) / count
    assert max((below[1:] - drawn).max(), (drawn - below[:-1]).max()) < allowed


def test_every_argument_counts() -> None:
    seeds, positions, indices = (0, 1, 2**32, -1), (0, 1, 2**33), (0, 1, 2)
    drawn = {
        noise(torch.tensor(seed), torch.tensor(position), purpose, index).item()
        for seed, position, purpose, index in product(seeds, positions, Purpose, indices)
    }
    assert len(drawn) == len(seeds) * len(positions) * len(Purpose) * len(indices)


def test_neighbours_and_order_do_not_count() -> None:
    seed, position = torch.tensor([3, 1, 4, 1, 5]), torch.tensor([9, 2, 6, 5, 3])
    order = torch.tensor([4, 2, 0, 3, 1])
    together = noise(seed, position, Purpose.DRAFT)
    assert torch.equal(noise(seed[order], position[order], Purpose.DRAFT), together[order])
    alone = [noise(s, p, Purpose.DRAFT).item() for s, p in zip(seed, position, strict=True)]
    assert alone == together.tolist()


def test_arguments_broadcast() -> None:
    table = noise(torch.tensor([[1], [2]]), torch.arange(3), Purpose.RECOVER, torch.tensor(4))
    assert table.shape == (2, 3)
    assert table[1, 2] == noise(torch.tensor(2), torch.tensor(2), Purpose.RECOVER, 4)


def test_torchs_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    noise(torch.tensor(1), torch.arange(9), Purpose.TARGET)
    assert torch.equal(before, torch.random.get_rng_state())
