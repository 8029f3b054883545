"""Jobs on a tiny target, and on a worker that needs no model."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hf_dcut import BatchRequest, BatchResult
from hf_dcut.jobs.plan import Plan
from hf_dcut.jobs.source import Line
from hf_dcut.jobs.worker import Refused
from hf_dcut.requests import Totals


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., Path]:
    """`write_lines(entries, name="in.jsonl")`: a file with one line an entry; bytes are written as they are."""

    def write(entries: Iterable[Any], name: str = "in.jsonl") -> Path:
        path = tmp_path / name
        raw = [entry if isinstance(entry, bytes) else json.dumps(entry).encode() for entry in entries]
        path.write_bytes(b"".join(line + b"\n" for line in raw))
        return path

    return write


@pytest.fixture
def make_plan(tmp_path: Path, tiny_folder: Path) -> Callable[..., Plan]:
    """`make_plan(input=..., **fields)`: results in out.jsonl, on the tiny target with prompt lookup."""

    def make(**fields: Any) -> Plan:
        given = {"output": str(tmp_path / "out.jsonl"), "target": str(tiny_folder), "drafter": "lookup", "budget": 0.5}
        return Plan(**{**given, "input": str(tmp_path / "in.jsonl"), "max_new_tokens": 12, **fields})

    return make


@pytest.fixture
def read_lines() -> Callable[[Path], list[dict[str, Any]]]:
    """`read_lines(path)`: the objects of a JSON-lines file, all of whose lines must be whole."""

    def read(path: Path) -> list[dict[str, Any]]:
        raw = path.read_bytes()
        assert not raw or raw.endswith(b"\n")
        return [json.loads(line) for line in raw.splitlines()]

    return read


class Echo:
    """A worker without a model: it says the prompt backwards, several requests at a time, in any order.

    Args:
        fail_at: numbers of lines whose request fails.
        stop_after: results after which Ctrl-C comes.
        refuse: numbers of lines that are refused.
        window: requests at once.
    """

    def __init__(
        self,
        fail_at: Sequence[int] = (),
        stop_after: int | None = None,
        refuse: Sequence[int] = (),
        window: int = 3,
        seed: int = 0,
    ):
        self.fail_at, self.stop_after, self.refuse, self.window = fail_at, stop_after, refuse, window
        self.random = random.Random(seed)
        self.asked: list[int] = []

    def request(self, line: Line) -> BatchRequest:
        if line.number in self.refuse:
            raise Refused(f"line {line.number} is too long")
        self.asked.append(line.number)
        return BatchRequest([ord(c) for c in str(line.prompt)], str(line.number))

    def longest(self, lines: Iterable[Line]) -> int:
        return max(len(line.prompt) for line in lines)

    def answer(self, requests: Iterable[BatchRequest], longest: int) -> Iterator[BatchResult]:
        waiting, running, said = iter(requests), [], 0
        while True:
            while len(running) < self.window and (request := next(waiting, None)) is not None:
                running.append(request)
            if not running:
                return
            if said == self.stop_after:
                raise KeyboardInterrupt
            request = running.pop(self.random.randrange(len(running)))
            said += 1
            failed = int(str(request.request_id)) in self.fail_at
            tokens = [] if failed else list(request.input_ids)[::-1]
            yield BatchResult(
                str(request.request_id),
                list(request.input_ids),
                tokens,
                error="poison" if failed else None,
                finish_reason="error" if failed else "length",
                totals=Totals(steps=len(tokens), kept=2 * len(tokens), accepted=len(tokens)),
                seconds=0.5,
            )

    def text(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))


@pytest.fixture
def echo() -> type[Echo]:
    """`echo(fail_at=(), stop_after=None, refuse=(), window=3)`, a worker without a model."""
    return Echo
