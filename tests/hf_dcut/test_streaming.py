"""What a streamer is given, piece by piece, is what `generate` returns in the end."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AsyncTextIteratorStreamer,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation import BaseStreamer

from hf_dcut import BatchStreamer, Piece, PromptLookupDrafter
from hf_dcut.drafters.base import Drafter

Inputs = dict[str, torch.Tensor]
NEW, D = 24, 6
GREEDY = {"do_sample": False, "max_new_tokens": NEW}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, behind three special ones."""
    byte_of = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", "<bos>", "<eos>", *byte_of]
    tokenizer = Tokenizer(models.BPE({word: k for k, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return tiny_llama(vocab_size=259, eos_token_id=[2, 50, 60, 70])


def pieces_of(tokenizer: PreTrainedTokenizerBase, parts: Sequence[Sequence[int]], **options: Any) -> list[Piece]:
    """Returns what is handed out for one request whose tokens come in these parts."""
    given: list[Piece] = []
    streamer = BatchStreamer(tokenizer, given.append, **options)
    for k, part in enumerate(parts, start=1):
        streamer.put(0, part, k == len(parts))
    return given


# The text.

TEXTS = [
    "plain words",
    "naïve café",
    "日本語のテキスト",
    "🙂🙃 👩‍👩‍👧",
    "नमस्ते दुनिया",
    "e\u0301\u0302 x",
    "\ufffd",
    "a\ufffd",
    " \n  b\n",
]


@pytest.mark.parametrize("text", TEXTS)
def test_characters_come_whole_however_their_bytes_are_split(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    for size in (1, 2, 3, 5, len(ids)):
        given = pieces_of(tokenizer, [ids[k : k + size] for k in range(0, len(ids), size)])
        assert "".join(piece.text for piece in given) == text
        assert [token for piece in given for token in piece.tokens] == ids
        assert "\ufffd" in text or not any("\ufffd" in piece.text for piece in given)


def test_a_character_comes_with_its_last_byte(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("é🙂!")["input_ids"]
    given = pieces_of(tokenizer, [[token] for token in ids])
    assert [piece.text for piece in given] == ["", "é", "", "", "", "🙂", "!"]
    assert [piece.done for piece in given] == [False] * 6 + [True]
    blocks = pieces_of(tokenizer, [ids[:4], ids[4:]])
    assert [piece.text for piece in blocks] == ["é", "🙂!"], "what is whole does not wait for what is not"


def test_broken_bytes_come_in_the_end(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("a🙂")["input_ids"][:-1]
    assert [piece.text for piece in pieces_of(tokenizer, [ids[:2], ids[2:]])] == ["a", "\ufffd"]
    lone = tokenizer("é")["input_ids"][1:]
    assert [piece.text for piece in pieces_of(tokenizer, [lone, lone, tokenizer("b")["input_ids"]])] == [
        "",
        "",
        "\ufffd\ufffdb",
    ]


def test_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = [*tokenizer("ab")["input_ids"], 2]
    for skip, text in ((True, "ab"), (False, "ab<eos>")):
        given = pieces_of(tokenizer, [[token] for token in ids], skip_special_tokens=skip)
        assert "".join(piece.text for piece in given) == text
        assert given[-1] == Piece(0, (2,), text[2:], True)


@pytest.mark.parametrize("seed", range(5))
def test_a_real_tokenizer(smollm2: Path, seed: int) -> None:
    tokenizer, generator = AutoTokenizer.from_pretrained(smollm2), random.Random(seed)
    ids = tokenizer(" ".join(TEXTS) + "\n\n\tdef f(x):\n        return 'it is n't'  , . !" * 2)["input_ids"]
    if seed > 2:
        ids = [generator.randrange(len(tokenizer)) for _ in range(300)]
    cuts = sorted(generator.sample(range(1, len(ids)), 60))
    parts = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    text = "".join(piece.text for piece in pieces_of(tokenizer, parts))
    assert text == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_long_text_costs_no_more_a_piece(tokenizer: PreTrainedTokenizerFast) -> None:
    class Counting:
        longest = 0

        def decode(self, tokens: Sequence[int], **options: Any) -> str:
            self.longest = max(self.longest, len(tokens))
            return str(tokenizer.decode(tokens, **options))

    counting = Counting()
    text = "ünïcödé " * 200
    ids = tokenizer(text)["input_ids"]
    given = pieces_of(counting, [ids[k : k + 4] for k in range(0, len(ids), 4)])  # type: ignore[arg-type]
    assert "".join(piece.text for piece in given) == text
    assert counting.longest <= 3 * 4


def test_requests_do_not_mix(tokenizer: PreTrainedTokenizerFast) -> None:
    texts, given = ["日本", "naïve", "🙂"], []
    streamer = BatchStreamer(tokenizer, given.append)
    left = [list(tokenizer(text)["input_ids"]) for text in texts]
    order = [row for row, ids in enumerate(left) for _ in ids]
    random.Random(0).shuffle(order)
    for row in order:
        streamer.put(row, [left[row].pop(0)], False)
    assert ["".join(p.text for p in given if p.request == row) for row in range(3)] == texts


def test_a_streamer_can_be_used_again(tokenizer: PreTrainedTokenizerFast) -> None:
    given: list[Piece] = []
    streamer = BatchStreamer(tokenizer, given.append)
    for _ in range(2):
        streamer.put(0, tokenizer("日")["input_ids"][:2], False)
        streamer.end()
    streamer.put(0, tokenizer("a")["input_ids"], True)
    assert [piece.text for piece in given] == ["", "", "a"]


def test_without_a_tokenizer_there_is_no_text() -> None:
    given: list[Piece] = []
    BatchStreamer(callback=given.append).put(3, [5, 6], True)
    assert given == [Piece(3, (5, 6), "", True)]


def test_a_callback_leaves_nothing_to_iterate_over() -> None:
    with pytest.raises(ValueError, match="hands its pieces to a callback: make one without"):
        list(BatchStreamer(callback=print))


def test_an_iterator_waits_no_longer_than_asked() -> None:
    streamer = BatchStreamer(timeout=0.05)
    streamer.put(0, [1], False)
    pieces, begin = iter(streamer), time.perf_counter()
    assert next(pieces) == Piece(0, (1,), "", False)
    with pytest.raises(queue.Empty):
        next(pieces)
    assert time.perf_counter() - begin < 5


# In generate.


def check_pieces(
    given: Sequence[Piece], sequences: torch.Tensor, width: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Asserts that the pieces make up the rows, end tokens included, and that each row's last one says so."""
    for row, text in enumerate(sequences[:, width:].tolist()):
        own = [piece for piece in given if piece.request == row]
        tokens = [token for piece in own for token in piece.tokens]
        assert tokens == text[: len(tokens)]
        assert not any(text[len(tokens) :]), "pads"
        assert [piece.done for piece in own] == [False] * (len(own) - 1) + [True]
        assert all(piece.tokens for piece in own)
        assert "".join(piece.text for piece in own) == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("budget", ["none", 1.0, 0.4])
def test_a_callback_gets_every_token_as_it_comes(
    model: PreTrainedModel,
    inputs: Inputs,
    knowing: Callable[..., Drafter],
    tokenizer: PreTrainedTokenizerFast,
    budget: Any,
) -> None:
    plain = model.generate(**inputs, **GREEDY)
    given: list[Piece] = []
    tokens = model.generate(
        **inputs,
        **GREEDY,
        streamer=BatchStreamer(tokenizer, given.append),
        assistant_model=knowing(inputs, plain, D),
        dcut=budget,
    )
    assert torch.equal(tokens, plain)
    check_pieces(given, tokens, inputs["input_ids"].shape[1], tokenizer)
    assert (max(len(piece.tokens) for piece in given) > 1) == (budget != "none")


def test_another_thread_iterates(
    model: PreTrainedModel, inputs: Inputs, knowing: Callable[..., Drafter], tokenizer: PreTrainedTokenizerFast
) -> None:
    plain = model.generate(**inputs, **GREEDY)
    streamer = BatchStreamer(tokenizer, timeout=60)
    options = {**GREEDY, "streamer": streamer, "assistant_model": knowing(inputs, plain, D), "dcut": 0.4}
    for _ in range(2):
        thread = threading.Thread(target=model.generate, kwargs={**inputs, **options})
        thread.start()
        check_pieces(list(streamer), plain, inputs["input_ids"].shape[1], tokenizer)
        thread.join()


FAILURES: dict[str, tuple[dict[str, Any], type[BaseException]]] = {
    "a bad budget": ({"dcut": "fats"}, ValueError),
    "no drafter": ({"assistant_model": None}, ValueError),
    "stop strings alone": ({"stop_strings": "x"}, ValueError),
    "an unknown option": ({"brand_new": 1}, ValueError),
    "a refused option": ({"num_beams": 2}, ValueError),
    "too little memory": ({"dcut": {"budget": 0.5, "max_cache_bytes": 10}}, MemoryError),
    "a failing processor": ({"logits_processor": [lambda ids, scores: scores[:, 1:]]}, ValueError),
    "an interrupt": (
        {"prefix_allowed_tokens_fn": lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)},
        KeyboardInterrupt,
    ),
}


@pytest.mark.parametrize(("options", "error"), FAILURES.values(), ids=FAILURES)
def test_the_stream_ends_when_generate_fails(
    model: PreTrainedModel, inputs: Inputs, options: dict[str, Any], error: type[BaseException]
) -> None:
    streamer = BatchStreamer(timeout=60)
    asked = {**GREEDY, "assistant_model": PromptLookupDrafter(3), "dcut": 0.5, **options}
    with pytest.raises(error):
        model.generate(**inputs, **asked, streamer=streamer)
    assert list(streamer) == []


def test_an_error_of_the_callback_is_the_users(model: PreTrainedModel, inputs: Inputs) -> None:
    def fail(piece: Piece) -> None:
        raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"):
        model.generate(**inputs, **GREEDY, prompt_lookup_num_tokens=3, dcut=0.5, streamer=BatchStreamer(callback=fail))


# Transformers' streamers, for one request.


class Protocol(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor | str] = []

    def put(self, value: torch.Tensor) -> None:
        self.given.append(value)

    def end(self) -> None:
        self.given.append("end")


@pytest.fixture
def one(inputs: Inputs) -> Inputs:
    return {name: tokens[1:2, -4:] for name, tokens in inputs.items()}


@pytest.mark.parametrize("budget", ["none", 1.0])
def test_puts_are_those_of_plain_generate_in_blocks(
    model: PreTrainedModel, one: Inputs, knowing: Callable[..., Drafter], budget: Any
) -> None:
    plain, ours = Protocol(), Protocol()
    tokens = model.generate(**one, **GREEDY, streamer=plain)
    drafter = knowing(one, tokens, D)
    assert torch.equal(model.generate(**one, **GREEDY, streamer=ours, assistant_model=drafter, dcut=budget), tokens)
    assert plain.given[-1] == ours.given[-1] == "end"
    assert torch.equal(ours.given[0], plain.given[0]), "the prompt, int64 [1, P]"  # type: ignore[arg-type]
    blocks = ours.given[1:-1]
    assert all(block.shape[0] == 1 and block.ndim == 2 and block.device.type == "cpu" for block in blocks)  # type: ignore[union-attr]
    assert torch.cat(blocks, dim=1)[0].tolist() == [int(token) for token in plain.given[1:-1]]  # type: ignore[arg-type]
    assert (len(blocks) < NEW) == (budget == 1.0)


def streamed(model: PreTrainedModel, inputs: Inputs, streamer: Any, **options: Any) -> list[str]:
    """Returns the texts that an iterator streamer gives while another thread generates."""
    thread = threading.Thread(target=model.generate, kwargs={**inputs, **GREEDY, "streamer": streamer, **options})
    thread.start()
    texts = list(streamer)
    thread.join()
    return texts


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_text_iterator(
    model: PreTrainedModel,
    one: Inputs,
    knowing: Callable[..., Drafter],
    tokenizer: PreTrainedTokenizerFast,
    skip_prompt: bool,
) -> None:
    drafter = knowing(one, model.generate(**one, **GREEDY), D)
    plain, ours = (
        "".join(streamed(model, one, TextIteratorStreamer(tokenizer, skip_prompt, timeout=60), **options))
        for options in ({}, {"assistant_model": drafter, "dcut": 1.0})
    )
    assert ours == plain
    assert len(plain) > 5


def test_text_streamer(
    model: PreTrainedModel,
    one: Inputs,
    tokenizer: PreTrainedTokenizerFast,
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = []
    for options in ({}, {"prompt_lookup_num_tokens": 3, "dcut": 1.0}):
        model.generate(**one, **GREEDY, streamer=TextStreamer(tokenizer), **options)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


def test_async_text_iterator(model: PreTrainedModel, one: Inputs, tokenizer: PreTrainedTokenizerFast) -> None:
    async def text(**options: Any) -> str:
        streamer = AsyncTextIteratorStreamer(tokenizer, timeout=60)
        asked = {**one, **GREEDY, "streamer": streamer, **options}
        thread = threading.Thread(target=model.generate, kwargs=asked)
        thread.start()
        return "".join([piece async for piece in streamer])

    assert asyncio.run(text()) == asyncio.run(text(prompt_lookup_num_tokens=3, dcut=1.0))


def test_a_streamer_for_one_is_refused_for_several_and_ended(
    model: PreTrainedModel, inputs: Inputs, tokenizer: PreTrainedTokenizerFast
) -> None:
    streamer = TextIteratorStreamer(tokenizer, timeout=60)
    with pytest.raises(
        ValueError, match="streamer=TextIteratorStreamer is for one request and there are 5: use hf_dcut"
    ):
        model.generate(**inputs, **GREEDY, prompt_lookup_num_tokens=3, dcut=1.0, streamer=streamer)
    assert "".join(streamer) == ""
    several = {"do_sample": True, "max_new_tokens": 3, "num_return_sequences": 2}
    one = {name: tokens[:1] for name, tokens in inputs.items()}
    with pytest.raises(ValueError, match="for one request and there are 2"):
        model.generate(**one, **several, dcut="none", streamer=streamer)
