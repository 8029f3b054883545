"""Jobs on a tiny target with a tokenizer of single characters, and on a worker that needs no model."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_dcut import BatchRequest, BatchResult
from hf_dcut.jobs.plan import Plan
from hf_dcut.jobs.source import Line
from hf_dcut.jobs.worker import Refused
from hf_dcut.requests import Totals

TEMPLATE = """
{%- for message in messages -%}
{%- if message.role not in ["system", "user", "assistant"] -%}{{ raise_exception("no such role") }}{%- endif -%}
{{ message.role }}: {{ message.content }}
{% endfor -%}
{%- if add_generation_prompt -%}assistant: {% endif -%}
{%- if enable_thinking -%}<think>{%- endif -%}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with a token for each of 98 characters, ids as in the tiny targets."""
    words = ["<pad>", "<bos>", "<eos>", *string.digits, *string.ascii_letters, *string.punctuation, " ", "\n", "é", "ü"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="?",
        chat_template=TEMPLATE.strip(),
    )


@pytest.fixture(scope="session")
def target(make_target: Callable[..., PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny target in float64 with its tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    make_target("llama").save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


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
def make_plan(tmp_path: Path, target: Path) -> Callable[..., Plan]:
    """`make_plan(input=..., **fields)`: results in out.jsonl, on the tiny target with prompt lookup."""

    def make(**fields: Any) -> Plan:
        given = {"output": str(tmp_path / "out.jsonl"), "target": str(target), "drafter": "lookup", "budget": 0.5}
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
