from __future__ import annotations

import pytest

from hf_dcut.wording import counted


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 rounds"), (1, "1 round"), (2, "2 rounds"), (12_345, "12,345 rounds")]
)
def test_one_has_no_s(count: int, words: str) -> None:
    assert counted(count, "round") == words
