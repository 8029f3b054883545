"""The cache of taps: what it keeps, what survives a kill, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_dcut.drafters.training import Answer, TapCache

ANSWERS = [Answer((1, 2, 3), 1), Answer((4, 5), 1), Answer((6, 7, 8, 9), 2)]


def rows(answer: Answer) -> Tensor:
    return torch.tensor([[float(i), -float(i)] for i in answer.ids])


def read(answers: Sequence[Answer]) -> Tensor:
    return torch.cat([rows(a) for a in answers])


def cache(folder: Path, **source: object) -> TapCache:
    return TapCache(folder, 2, "bfloat16", {"target": "tiny", **source})


def check(taps: Callable[[Answer], Tensor], answers: Sequence[Answer]) -> None:
    for answer in answers:
        assert torch.equal(taps(answer).float(), rows(answer))


def test_taps_come_back_by_answer(tmp_path: Path) -> None:
    filled = cache(tmp_path)
    assert list(filled.fill(ANSWERS, read, batch_tokens=5)) == [2, 1]
    assert filled.tokens == 9
    check(filled.open(), ANSWERS)
    again = cache(tmp_path)
    assert again.missing(ANSWERS) == []
    check(again.open(), ANSWERS)


def test_a_cache_grows(tmp_path: Path) -> None:
    list(cache(tmp_path).fill(ANSWERS[:1], read))
    grown = cache(tmp_path)
    assert grown.missing([*ANSWERS, ANSWERS[2]]) == ANSWERS[1:]
    list(grown.fill(ANSWERS, read))
    check(cache(tmp_path).open(), ANSWERS)


def test_a_kill_loses_only_the_answers_in_work(tmp_path: Path) -> None:
    list(cache(tmp_path).fill(ANSWERS[:2], read))
    with open(tmp_path / "taps.bin", "ab") as taps, open(tmp_path / "index.jsonl", "a") as index:
        taps.write(b"rows that no line names")
        index.write('{"digest": "cut sho')
    after = cache(tmp_path)
    assert after.missing(ANSWERS) == ANSWERS[2:]
    check(after.open(), ANSWERS[:2])
    list(after.fill(ANSWERS, read))
    check(cache(tmp_path).open(), ANSWERS)


def test_an_empty_cache_opens(tmp_path: Path) -> None:
    empty = cache(tmp_path)
    assert list(empty.fill([], read)) == []
    empty.open()


def test_taps_of_something_else_are_refused(tmp_path: Path) -> None:
    cache(tmp_path)
    with pytest.raises(ValueError, match=r"target='tiny'.*wanted target='other'.*another folder"):
        cache(tmp_path, target="other")


def test_too_small_a_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 30})())
    full = cache(tmp_path)
    with pytest.raises(OSError, match=r"taps of 9 tokens need .* GB .*4 bytes a token"):
        list(full.fill(ANSWERS, read))
    assert not (tmp_path / "taps.bin").exists()
