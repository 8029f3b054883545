"""What the tests of the benchmark share: made-up traces, and a tiny model with a tokenizer in a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_dcut.bench.trace import Trace


def build_traces(
    requests: int,
    tokens: int = 64,
    depth: int = 15,
    moods: Sequence[float] = (0.97, 0.86, 0.62, 0.35, 0.15),
    seed: int = 0,
    prompt_tokens: int = 20,
) -> list[Trace]:
    """Returns traces whose drafts hold with the probability they are given; each position draws how sure it is."""
    generator = torch.Generator().manual_seed(seed)
    traces = []
    for _ in range(requests):
        mood = torch.tensor(moods)[torch.randint(len(moods), (tokens - 1, 1), generator=generator)]
        confidence = mood * (0.9 + 0.1 * torch.rand(tokens - 1, depth, generator=generator))
        held = torch.rand(tokens - 1, depth, generator=generator) < confidence
        inside = torch.arange(depth) < torch.arange(tokens - 1, 0, -1)[:, None]
        right = held.cumprod(1).bool() & inside
        traces.append(Trace(prompt_tokens, tokens, tokens, confidence, torch.full((tokens - 1,), depth), right))
    return traces


@pytest.fixture(scope="session")
def make_traces() -> Callable[..., list[Trace]]:
    """`make_traces(requests, tokens=64, depth=15, moods=..., seed=0, prompt_tokens=20)`, calibrated by construction."""
    return build_traces


@pytest.fixture(scope="session")
def folder(make_target: Callable[..., PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved float32 model whose words are w3 .. w100, with two prompt files beside it, one.jsonl and two.jsonl."""
    path = tmp_path_factory.mktemp("tiny")
    make_target("llama", dtype=torch.float32).save_pretrained(path)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 101)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>").save_pretrained(path)
    for name, first in (("one", 3), ("two", 50)):
        lines = [" ".join(f"w{first + (7 * row + 3 * i) % 40}" for i in range(2 + row % 4)) for row in range(8)]
        (path / f"{name}.jsonl").write_text("".join(f'{{"prompt": "{line}"}}\n' for line in lines))
    return path
