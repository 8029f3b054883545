"""The input of a job: JSON lines, each a prompt with its id and options.

The whole input is looked at before a model is loaded, so that what is wrong with it shows at once. Nothing of a line is
ever used as a path, a name of code, or a format.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BufferedIOBase
from pathlib import Path
from typing import Any, cast

from hf_dcut.jobs import options

STDIN = "-"
LONGEST_LINE = 16 << 20
_LONGEST_ID = 512
_KEYS = ("id", "prompt", "messages", "options", "metadata")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """One prompt.

    Attributes:
        number: of the line, from 1.
        id: what its result is called; the number, as text, if the line has none.
        prompt: raw text, or the messages of a chat.
        options: the line's own.
        metadata: anything, copied to the result.
    """

    number: int
    id: str | int
    prompt: str | list[dict[str, str]]
    options: dict[str, Any] = field(default_factory=dict)
    metadata: Any = None


class Source:
    """The lines of an input, to be gone through any number of times.

    Args:
        name: a file, or "-" for standard input, which is read to its end first.
        max_new_tokens: the most that a line may ask for.

    Attributes:
        digest: of all bytes.
        lines: how many can be answered.
        rejects: number of each that cannot, and why.

    Raises:
        FileNotFoundError, IsADirectoryError: no such file.
    """

    def __init__(self, name: str, max_new_tokens: int):
        self._file = _open(name)
        self._most = max_new_tokens
        self.digest = hashlib.file_digest(self._file, "sha256").hexdigest()
        self.lines = 0
        self.rejects: dict[int, str] = {}
        self._last = 0
        self._survey()

    def __iter__(self) -> Iterator[Line]:
        """Yields the lines that can be answered, in order."""
        for number, raw in _numbered(self._file):
            if number > self._last:
                return  # the file has grown since it was looked at
            if number not in self.rejects:
                yield parse(raw, number, self._most)

    def rejected(self) -> Iterator[dict[str, Any]]:
        """Yields the rejected lines: number, reason and text, JSON-able. Of a line that is too long, its beginning."""
        for number, raw in _numbered(self._file):
            if number in self.rejects:
                text = raw.decode(errors="backslashreplace")
                yield {"line": number, "error": self.rejects[number], "text": text}

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _survey(self) -> None:
        """Counts the lines and finds those that cannot be answered, duplicate ids among them."""
        seen: dict[str, int] = {}
        for number, raw in _numbered(self._file):
            self._last = number
            try:
                line = parse(raw, number, self._most)
                first = seen.setdefault(str(line.id), number)
                if first != number:
                    raise ValueError(f"id {line.id!r} is that of line {first} already: ids name results, one each")
            except ValueError as error:
                self.rejects[number] = str(error)
            else:
                self.lines += 1


def parse(raw: bytes, number: int, max_new_tokens: int) -> Line:
    """Returns what a line holds.

    Args:
        raw: the line, in UTF-8.
        number: of the line.
        max_new_tokens: the most it may ask for.

    Raises:
        ValueError: what is wrong with it and what to do.
    """
    if len(raw) > LONGEST_LINE:
        raise ValueError(f"longer than {LONGEST_LINE >> 20} MiB")
    entry = _object(raw)
    unknown = sorted(set(entry) - set(_KEYS))
    if unknown:
        raise ValueError(
            f"unknown key {unknown[0]!r}: the keys are {', '.join(_KEYS)}. Generation options go under 'options', "
            "what shall come back with the result under 'metadata'"
        )
    given = entry.get("options", {})
    if not isinstance(given, dict):
        raise ValueError(f"'options' is {_kind(given)}: give an object such as {{'temperature': 0.7}}")
    options.check(given)
    if given.get("max_new_tokens", 1) > max_new_tokens:
        asked = given["max_new_tokens"]
        raise ValueError(
            f"option max_new_tokens={asked} is above the job's limit: raise --max-new-tokens {max_new_tokens}"
        )
    return Line(number, _id(entry, number), _prompt(entry), given, entry.get("metadata"))


def _object(raw: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(raw.decode(), parse_constant=_no_constant)
        # Text with half a surrogate pair parses, but neither tokenizes nor can be written as UTF-8.
        json.dumps(entry, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason} at byte {error.start})") from error
    except UnicodeEncodeError as error:
        raise ValueError(f"holds half a surrogate pair ({error.object[error.start]!r})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(entry, dict):
        raise ValueError(f"is {_kind(entry)}: give an object such as {{'prompt': 'One, two,'}}")
    return entry


def _no_constant(name: str) -> None:
    raise ValueError(f"not JSON ({name} is no number)")


def _id(entry: dict[str, Any], number: int) -> str | int:
    name = entry.get("id", str(number))
    if isinstance(name, bool) or not isinstance(name, (str, int)) or name == "" or len(str(name)) > _LONGEST_ID:
        raise ValueError(f"'id' is {_kind(name)}: give an integer, or text of 1 to {_LONGEST_ID} characters")
    return name


def _prompt(entry: dict[str, Any]) -> str | list[dict[str, str]]:
    if ("prompt" in entry) == ("messages" in entry):
        raise ValueError("give either 'prompt' (raw text) or 'messages' (a chat)")
    if "prompt" in entry:
        text = entry["prompt"]
        if not isinstance(text, str) or not text:
            raise ValueError(f"'prompt' is {_kind(text)}: give text of at least one character")
        return text
    messages = entry["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"'messages' is {_kind(messages)}: give a list of at least one message")
    for i, message in enumerate(messages):
        if not (
            isinstance(message, dict)
            and set(message) == {"role", "content"}
            and all(isinstance(value, str) for value in message.values())
        ):
            raise ValueError(f"message {i} must be an object with the texts 'role' and 'content', and nothing else")
    return messages


def _kind(value: object) -> str:
    """Returns what a JSON value is, in words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, (str, list, dict)) and not value:
        return "empty"
    names = {str: "text", int: "an integer", float: "a number", list: "a list", dict: "an object"}
    return names[type(value)]


def _numbered(file: BufferedIOBase) -> Iterator[tuple[int, bytes]]:
    """Yields number and bytes of the lines that are not blank; of one that is too long, its beginning."""
    file.seek(0)
    number = 0
    while raw := file.readline(LONGEST_LINE + 2):
        number += 1
        rest = raw
        while len(rest) > LONGEST_LINE and not rest.endswith(b"\n"):
            rest = file.readline(LONGEST_LINE + 2)
        raw = raw.removeprefix(_BOM) if number == 1 else raw
        if raw.strip():
            yield number, raw.rstrip(b"\r\n")


def _open(name: str) -> BufferedIOBase:
    """Returns a file that can be read more than once; of a pipe, an unnamed copy of all that comes."""
    stream = sys.stdin.buffer if name == STDIN else Path(name).open("rb")  # noqa: SIM115 (kept open)
    if name != STDIN and stream.seekable():
        return cast(BufferedIOBase, stream)
    file = tempfile.TemporaryFile()  # noqa: SIM115 (kept open)
    shutil.copyfileobj(stream, file)
    file.seek(0)
    return cast(BufferedIOBase, file)
