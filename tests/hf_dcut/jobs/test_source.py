"""The input: what a line may hold, what is rejected and how, what is never done with it."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcut.jobs import source
from hf_dcut.jobs.source import Line, Source, parse

MOST = 100


def read(path: Path) -> list[Line]:
    return list(Source(str(path), MOST))


def test_lines_of_all_kinds(write_lines: Callable[..., Path]) -> None:
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}]
    entries = [
        {"prompt": "One,"},
        {"id": "a/b", "messages": chat, "options": {"temperature": 0.5, "max_new_tokens": MOST}},
        {"id": 7, "prompt": "Grüße", "metadata": {"answer": [1, None]}},
    ]
    assert read(write_lines(entries)) == [
        Line(1, "1", "One,"),
        Line(2, "a/b", chat, {"temperature": 0.5, "max_new_tokens": MOST}),
        Line(3, 7, "Grüße", {}, {"answer": [1, None]}),
    ]


def test_blank_lines_windows_ends_a_byte_order_mark_and_a_missing_last_end(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n   \n{"prompt": "b"}\n\n{"prompt": "c"}')
    assert [(line.number, line.prompt) for line in read(path)] == [(1, "a"), (4, "b"), (6, "c")]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"prompt": "a"', "not JSON"),
        (b"prompt", "not JSON"),
        (b'{"prompt": "a", "metadata": NaN}', "NaN is no number"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (rb'{"prompt": "\ud800"}', "half a surrogate pair"),
        (rb'{"prompt": "a", "metadata": ["\ud800"]}', "half a surrogate pair"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"prompt": "a", "metadata": 1' + b"0" * 5000 + b"}", "not JSON|limit"),
        (b"[1, 2]", "is a list"),
        (b'"text"', "is text"),
        (b"{}", "either 'prompt' .* or 'messages'"),
        (b'{"prompt": "a", "messages": []}', "either 'prompt' .* or 'messages'"),
        (b'{"prompt": ""}', "'prompt' is empty"),
        (b'{"prompt": 5}', "'prompt' is an integer"),
        (b'{"prompt": null}', "'prompt' is null"),
        (b'{"messages": []}', "'messages' is empty"),
        (b'{"messages": "Hi"}', "'messages' is text"),
        (b'{"messages": [{"role": "user"}]}', "message 0"),
        (b'{"messages": [{"role": "user", "content": "a", "tool": 1}]}', "message 0"),
        (b'{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": [1]}]}', "message 1"),
        (b'{"id": null, "prompt": "a"}', "'id' is null"),
        (b'{"id": "", "prompt": "a"}', "'id' is empty"),
        (b'{"id": true, "prompt": "a"}', "'id' is true"),
        (b'{"id": 1.5, "prompt": "a"}', "'id' is a number"),
        (b'{"id": "' + b"x" * 513 + b'", "prompt": "a"}', "1 to 512 characters"),
        (b'{"prompt": "a", "promt": "b"}', "unknown key 'promt': the keys are id, prompt"),
        (b'{"prompt": "a", "temperature": 1}', "unknown key 'temperature'.*under 'options'"),
        (b'{"prompt": "a", "options": []}', "'options' is empty: give an object"),
        (b'{"prompt": "a", "options": {"top_p": 2}}', "option top_p=2"),
        (b'{"prompt": "a", "options": {"num_beams": 2}}', "'num_beams' is not known"),
        (b'{"prompt": "a", "options": {"max_new_tokens": 101}}', "above the job's limit: raise --max-new-tokens 100"),
    ],
)
def test_bad_lines_are_named_kept_and_left_out(raw: bytes, reason: str, write_lines: Callable[..., Path]) -> None:
    lines = Source(str(write_lines([{"prompt": "first"}, raw, {"prompt": "last"}])), MOST)
    assert [line.number for line in lines] == [1, 3]
    assert lines.lines == 2
    (rejected,) = lines.rejected()
    assert rejected["line"] == 2
    assert rejected["text"].encode() == raw or b"\xff" in raw
    with pytest.raises(ValueError, match=reason):
        parse(raw, 2, MOST)


def test_bytes_that_are_no_text_are_kept_as_escapes(write_lines: Callable[..., Path]) -> None:
    (rejected,) = Source(str(write_lines([b"\xff\x00!"])), MOST).rejected()
    assert rejected["text"] == "\\xff\x00!"
    json.dumps(rejected)


def test_duplicate_ids_are_rejected_with_both_numbers(write_lines: Callable[..., Path]) -> None:
    entries = [{"id": "3", "prompt": "a"}, {"id": "x", "prompt": "b"}, {"prompt": "c"}, {"id": "x", "prompt": "d"}]
    lines = Source(str(write_lines([*entries, {"id": 3, "prompt": "e"}])), MOST)
    assert [line.prompt for line in lines] == ["a", "b"]
    reasons = {number: reason.split(":")[0] for number, reason in lines.rejects.items()}
    assert reasons == {
        3: "id '3' is that of line 1 already",
        4: "id 'x' is that of line 2 already",
        5: "id 3 is that of line 1 already",
    }


def test_a_line_without_end_is_not_read_into_memory(
    write_lines: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "LONGEST_LINE", 64)
    good = b'{"prompt": "' + b"x" * (64 - 14) + b'"}'
    assert len(good) == 64
    lines = Source(str(write_lines([good, b"y" * 65, b"z" * 1000, good])), MOST)
    assert [line.number for line in lines] == [1, 4]
    assert {number: "longer than" in reason for number, reason in lines.rejects.items()} == {2: True, 3: True}
    assert [len(rejected["text"]) for rejected in lines.rejected()] == [65, 66]


def test_digest_is_that_of_the_bytes(write_lines: Callable[..., Path]) -> None:
    digests = [Source(str(write_lines([{"prompt": text}], name)), MOST).digest for text, name in ["ap", "aq", "br"]]
    assert digests[0] == digests[1] != digests[2]


def test_what_is_added_while_the_job_runs_waits_for_the_next(write_lines: Callable[..., Path]) -> None:
    path = write_lines([{"prompt": "a"}])
    lines = Source(str(path), MOST)
    with path.open("ab") as file:
        file.write(b'{"prompt": "b"}\n')
    assert [line.prompt for line in lines] == ["a"]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO(b'{"prompt": "a"}\n{"prompt": "b"}\n')
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw))
    lines = Source("-", MOST)
    assert [[line.prompt for line in lines] for _ in range(2)] == [["a", "b"]] * 2


def test_a_named_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    thread = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=[b'{"prompt": "a"}\n'])
    thread.start()
    lines = Source(str(tmp_path / "pipe"), MOST)
    thread.join()
    assert [line.prompt for line in lines] == ["a"]


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        Source(str(tmp_path / "none.jsonl"), MOST)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["role", "content", "prompt", "seed"]), inner),
)
ENTRIES = st.dictionaries(st.sampled_from(["id", "prompt", "messages", "options", "metadata", "x"]), JSON)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(), ENTRIES.map(lambda entry: json.dumps(entry).encode())))
def test_any_bytes_are_a_line_or_a_reason(raw: bytes) -> None:
    try:
        line = parse(raw, 5, MOST)
    except ValueError:
        return
    entry: dict[str, Any] = json.loads(raw)
    assert line.prompt == entry.get("prompt", entry.get("messages"))
    assert line.id == entry.get("id", "5")
