"""A tiny target with a tokenizer, on disk, for the demo: its text is full of what could pass for HTML or a template."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_dcut.app.models import Models
from hf_dcut.app.run import Run
from hf_dcut.app.settings import Limits, Settings

NASTY = ("<b>", "</p>", "{{", "}}", "${", "`", "&lt;", "<script>", '"')
PROMPTS = ("a b c a b c a b", "one two one two one", "xyzzy xyzzy xy", "<script>alert(1)</script>")


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of single characters, 101 ids, the last of them pieces of HTML and of templates."""
    letters = string.ascii_lowercase + string.ascii_uppercase + string.digits + " .,;:!?()<>/=\n"
    words = ["<pad>", "<s>", "</s>", *letters, *NASTY]
    vocabulary = {word: number for number, word in enumerate([*words, *(f"#{i}" for i in range(101 - len(words)))])}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def target_folder(make_target: Callable[..., PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama in float64 and its tokenizer. Its text falls into loops, which prompt lookup hits."""
    folder = tmp_path_factory.mktemp("target") / "tiny-llama"
    make_target("llama", seed=3, initializer_range=0.08).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def models_of(target_folder: Path) -> Callable[..., Models]:
    """`models_of(**fields)`: the tiny target with prompt lookup and an untrained drafter, not loaded yet."""

    def build(**fields: Any) -> Models:
        fields = {"dtype": "float64", "first_batch": 4, "cost_table": "off", **fields}
        return Models(str(target_folder), ("lookup", "random"), **fields)

    return build


@pytest.fixture(scope="session")
def models(models_of: Callable[..., Models]) -> Models:
    """The same, loaded."""
    made = models_of()
    made.start()
    assert made.wait()
    return made


@pytest.fixture
def settings() -> Callable[..., Settings]:
    """`settings(**fields)`: four prompts, prompt lookup, 24 new tokens."""
    return lambda **fields: Settings(**{"prompts": PROMPTS, "drafter": "lookup", "new_tokens": 24, **fields})


@pytest.fixture
def finished(models: Models, settings: Callable[..., Settings]) -> Callable[..., Run]:
    """`finished(method="cut", **fields)`: a run to its end."""

    def build(method: str = "cut", **fields: Any) -> Run:
        run = Run(models, settings(**fields), Limits(), method)
        run.open()
        while not run.done:
            run.step()
        run.close()
        return run

    return build
