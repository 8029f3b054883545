"""Answers and anchors: what is read, what is refused, and what an epoch holds."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from hf_dcut.drafters.training.answers import (
    Answer,
    frequent_tokens,
    pieces,
    read_answers,
    without_loop,
    write_answer,
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    answers = [Answer((1, 2, 3), 1), Answer((4, 5), 2)]
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(map(write_answer, answers)) + "\n")
    assert read_answers(path) == answers


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "no list of token ids"),
        (json.dumps({"ids": "12", "prompt_tokens": 1}), "no list of token ids"),
        (json.dumps({"ids": [1, -2], "prompt_tokens": 1}), "no list of token ids"),
        (json.dumps({"ids": [1, 2], "prompt_tokens": 3}), "prompt_tokens=3: give 1 to its 2 tokens"),
        (json.dumps({"ids": [1, 2], "prompt_tokens": 0}), "prompt_tokens=0"),
        (json.dumps({"ids": [1, 2]}), "prompt_tokens=None"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(write_answer(Answer((1, 2), 1)) + "\n" + line + "\n")
    with pytest.raises(ValueError, match="line 3") as error:
        read_answers(path)
    assert message in str(error.value)


def test_packed_answers_are_read(tmp_path: Path) -> None:
    answer = Answer((5, 6, 7, 8), 2)
    path = tmp_path / "answers.jsonl.gz"
    path.write_bytes(gzip.compress(write_answer(answer).encode()))
    assert read_answers(path) == [answer]


def test_no_file_and_no_answers(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_answers(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no answers"):
        read_answers(tmp_path / "empty.jsonl")


def test_a_loop_is_cut_where_eight_tokens_come_for_the_third_time() -> None:
    period = list(range(10, 19))
    ids = [1, 2, *[7, 7], *period, *period, *period, *period]
    # Nine different tokens a period, so the same eight stand at offsets 2, 11 and 20 of the answer.
    assert without_loop(Answer(tuple(ids), 2)).ids == tuple(ids[: 2 + 20])
    assert without_loop(Answer(tuple(ids[: 2 + 28]), 2)).ids == tuple(ids[: 2 + 20])
    twice = Answer(tuple(ids[: 2 + 20]), 2)
    assert without_loop(twice) is twice


def test_a_prompt_that_repeats_itself_is_no_loop() -> None:
    answer = Answer((*[5] * 40, 6, 7), 40)
    assert without_loop(answer) is answer


def test_an_epoch_holds_every_anchor_once() -> None:
    answers = [Answer(tuple(range(n)), 3) for n in (3, 4, 5, 12, 30)]
    found = pieces(answers, anchors=7, seed=1, epoch=2)
    seen = Counter((piece.index, anchor) for piece in found for anchor in piece.anchors)
    wanted = {(i, a) for i, answer in enumerate(answers) for a in range(3, len(answer) - 1)}
    assert set(seen) == wanted
    assert set(seen.values()) == {1}
    assert all(len(piece.anchors) <= 7 and list(piece.anchors) == sorted(piece.anchors) for piece in found)


def test_epochs_differ_and_repeat() -> None:
    answers = [Answer(tuple(range(40)), 3)] * 3
    assert pieces(answers, 8, 0, 0) == pieces(answers, 8, 0, 0)
    assert pieces(answers, 8, 0, 0) != pieces(answers, 8, 0, 1)
    assert pieces(answers, 8, 0, 0) != pieces(answers, 8, 1, 0)


def test_frequent_tokens_are_those_of_the_answers() -> None:
    answers = [Answer((9, 9, 9, 9, 4, 4, 6), 4)]
    assert frequent_tokens(answers, 2, 10) == [4, 6]
    assert frequent_tokens(answers, 4, 10) == [0, 1, 4, 6]
    with pytest.raises(ValueError, match="draft_vocab_size=11"):
        frequent_tokens(answers, 11, 10)
