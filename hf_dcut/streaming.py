"""Tokens as they are committed: Transformers' streamers for one request, and a batched one."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step gave one request.

    Attributes:
        request: row in the batch.
        tokens: new token ids; empty in a request's last piece if nothing but held-back text came.
        text: text that is now certain; "" without a tokenizer.
        done: whether the request ended with it.
    """

    request: int
    tokens: tuple[int, ...]
    text: str
    done: bool


@dataclass(slots=True)
class _Window:
    """The last tokens of a request: all that is decoded for the next piece, so that a long text costs no more.

    Attributes:
        tokens: the context, then those that no whole piece of text came of yet.
        context: tokens whose text was handed out. A token alone may decode to other text, without its leading space.
        shown: characters of the window's text that were handed out.
    """

    tokens: list[int] = field(default_factory=list)
    context: int = 0
    shown: int = 0


class BatchStreamer:
    """Delivers the tokens of many requests, piece by piece: by a callback, or to whoever iterates over it.

    Text is handed out only once it cannot change any more: a character whose bytes are spread over several tokens comes
    with the last of them.

    Args:
        tokenizer: decodes the text; None leaves it out.
        callback: called with each `Piece` in the generating thread; without it pieces wait to be iterated over, which
            is for another thread than the generating one.
        skip_special_tokens: leaves end tokens and the like out of the text.
        timeout: seconds an iterator waits for the next piece; None waits for ever.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None = None,
        callback: Callable[[Piece], object] | None = None,
        skip_special_tokens: bool = True,
        timeout: float | None = None,
    ):
        self.tokenizer, self.callback, self.timeout = tokenizer, callback, timeout
        self.skip_special_tokens = skip_special_tokens
        self._queue: queue.Queue[Piece | None] = queue.Queue()
        self._windows: dict[int, _Window] = {}

    def put(self, request: int, tokens: Sequence[int], done: bool) -> None:
        """Takes new tokens of a request and hands out the piece."""
        piece = Piece(request, tuple(tokens), self._new_text(request, tokens, done), done)
        if self.callback is not None:
            self.callback(piece)
        else:
            self._queue.put(piece)

    def end(self) -> None:
        """Ends the iteration, after which the streamer can be used again. Called by `generate`, also when it fails."""
        self._windows.clear()
        if self.callback is None:
            self._queue.put(None)

    def __iter__(self) -> Iterator[Piece]:
        if self.callback is not None:
            raise ValueError("this BatchStreamer hands its pieces to a callback: make one without to iterate over")
        while (piece := self._queue.get(timeout=self.timeout)) is not None:
            yield piece

    def _new_text(self, request: int, tokens: Sequence[int], done: bool) -> str:
        """Returns the text behind what was handed out, up to the last whole character."""
        if self.tokenizer is None:
            return ""
        window = self._windows.setdefault(request, _Window())
        window.tokens += tokens
        text = self._decode(window.tokens)
        # An incomplete character decodes to U+FFFD at the end; it is held back until its last byte comes.
        certain = text if done else text.rstrip("\ufffd")
        piece = certain[window.shown :]
        if certain == text and piece:
            context = window.tokens[window.context :]
            self._windows[request] = _Window(context, len(context), len(self._decode(context)))
        else:
            window.shown = max(window.shown, len(certain))
        return piece

    def _decode(self, tokens: Sequence[int]) -> str:
        assert self.tokenizer is not None
        return str(self.tokenizer.decode(tokens, skip_special_tokens=self.skip_special_tokens))


def check_streamer(streamer: Any, rows: int) -> None:
    """Raises ValueError for one of Transformers' streamers, which take a single request, when there are more."""
    if rows > 1 and streamer is not None and not isinstance(streamer, BatchStreamer):
        raise ValueError(
            f"streamer={type(streamer).__name__} is for one request and there are {rows}: "
            f"use hf_dcut.BatchStreamer(tokenizer)"
        )


def listeners(streamer: Any, input_ids: Tensor) -> list[Callable[[Sequence[int], bool], None] | None]:
    """Returns one listener a request that feeds the streamer, after giving it the prompt as `generate` does.

    Args:
        streamer: a `BatchStreamer`, one of Transformers' for a single request, or None.
        input_ids: int64 [B, P].
    """
    rows = len(input_ids)
    if streamer is None:
        return [None] * rows
    if isinstance(streamer, BatchStreamer):
        return [_batched(streamer, row) for row in range(rows)]
    streamer.put(input_ids.cpu())
    return [lambda tokens, done: streamer.put(torch.tensor([list(tokens)]))]


def _batched(streamer: BatchStreamer, row: int) -> Callable[[Sequence[int], bool], None]:
    return lambda tokens, done: streamer.put(row, tokens, done)
