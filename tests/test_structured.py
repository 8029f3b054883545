"""A grammar for each request, by a real library whose matchers advance with every call.

XGrammar's processor refuses a token that its grammar does not allow, so it fails when it is called twice for a token,
not at all, or with a draft that was rejected.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_dcut import PerRequest
from hf_dcut.drafters.base import Drafter

pytestmark = pytest.mark.extras

Inputs = dict[str, torch.Tensor]
V, END, NEW, D = 101, 2, 48, 6
# All of bounded length, so that every text comes to its end. Tokens of several characters cross the parts.
PATTERNS = [
    r'\{"name": "[a-z]{1,6}", "age": [1-9][0-9]{0,2}\}',
    r"[a-f]{4,6}(-[0-9]{2}){2,3}",
    r"(ab|cd){2,5}x?",
    r"[A-Z][a-z]{3,9}( [A-Z][a-z]{2,5}){1,2}",
    r"(yes|no)( because [a-z]{2,6})?",
]
WORDS = ["<pad>", "<bos>", "<eos>", *string.ascii_letters, *string.digits, *'{}":, -']
WORDS += [
    '{"',
    '": ',
    '"}',
    '", "',
    "name",
    "age",
    "ab",
    "cd",
    "abcd",
    "cda",
    "yes",
    "no",
    " be",
    "cause",
    "12",
    "-0",
    "0-",
]
WORDS += [first + second for first, second in zip("eionrtlsuzkh", "anteslurhity", strict=True)]


@pytest.fixture(scope="module")
def grammars() -> list[Any]:
    xgrammar = pytest.importorskip("xgrammar")
    info = xgrammar.TokenizerInfo(WORDS, vocab_size=V, stop_token_ids=[END])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    return [compiler.compile_regex(pattern) for pattern in PATTERNS]


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    assert len(WORDS) == len(set(WORDS)) == V
    return tiny_llama(eos_token_id=END)


def each(grammars: list[Any]) -> list[PerRequest]:
    from xgrammar.contrib.hf import LogitsProcessor

    return [PerRequest(lambda row: LogitsProcessor(grammars[row]))]


def check_texts(sequences: torch.Tensor, width: int) -> None:
    for pattern, row in zip(PATTERNS, sequences[:, width:].tolist(), strict=True):
        text = "".join(WORDS[token] for token in row[: row.index(END)])
        assert re.fullmatch(pattern, text), (pattern, text)


@pytest.mark.parametrize("budget", ["none", 1.0, 0.4])
@pytest.mark.parametrize("samples", [False, True])
def test_texts_match_and_are_those_of_plain_generate(
    model: PreTrainedModel,
    make_prompts: Callable[..., Inputs],
    knowing: Callable[..., Drafter],
    grammars: list[Any],
    budget: Any,
    samples: bool,
) -> None:
    inputs = make_prompts(len(PATTERNS), seed=4)
    options = {"do_sample": samples, "max_new_tokens": NEW, "top_k": 0 if samples else None}
    # Samples of plain generate are others, so those are compared with plain steps on our own engine.
    alone = {"dcut": "none", "seed": 3} if samples else {}
    plain = model.generate(**inputs, **options, **alone, logits_processor=each(grammars))
    for profile in ((0.3, 0.9, 1.0), (0.0,)):
        output = model.generate(
            **inputs,
            **options,
            seed=3,
            logits_processor=each(grammars),
            return_dict_in_generate=True,
            assistant_model=knowing(inputs, plain, D, profile),
            dcut=budget,
        )
        assert torch.equal(output.sequences, plain)
        check_texts(output.sequences, inputs["input_ids"].shape[1])
        assert (output.stats.accepted_tokens > 0) == (budget != "none" and any(profile))


def test_one_processor_for_all_says_what_to_do(
    model: PreTrainedModel, make_prompts: Callable[..., Inputs], grammars: list[Any]
) -> None:
    from xgrammar.contrib.hf import LogitsProcessor

    with pytest.raises(TypeError, match=r"LogitsProcessor cannot be copied for each request .*hf_dcut\.PerRequest"):
        model.generate(
            **make_prompts(3), dcut="none", max_new_tokens=5, logits_processor=[LogitsProcessor(grammars[0])]
        )
