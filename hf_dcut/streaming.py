"""Tokens as they are committed: Transformers' streamers for one request, and a batched one."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
        self._tokens: dict[int, list[int]] = {}
        self._shown: dict[int, str] = {}

    def put(self, request: int, tokens: Sequence[int], done: bool) -> None:
        """Takes new tokens of a request and hands out the piece."""
        self._tokens.setdefault(request, []).extend(tokens)
        piece = Piece(request, tuple(tokens), self._new_text(request, done), done)
        if self.callback is not None:
            self.callback(piece)
        else:
            self._queue.put(piece)

    def end(self) -> None:
        """Ends the iteration. Called by `generate`, also when it fails."""
        self._queue.put(None)

    def __iter__(self) -> Iterator[Piece]:
        if self.callback is not None:
            raise ValueError("a BatchStreamer with a callback hands its pieces to that: make one without to iterate over")
        while (piece := self._queue.get(timeout=self.timeout)) is not None:
            yield piece

    def _new_text(self, request: int, done: bool) -> str:
        """Returns the text behind what was handed out, up to the last whole character."""
        if self.tokenizer is None:
            return ""
        text = self.tokenizer.decode(self._tokens[request], skip_special_tokens=self.skip_special_tokens)
        if not done:
            # An incomplete character decodes to U+FFFD at the end; it is held back until its last byte comes.
            text = text.rstrip("\ufffd")
        shown = self._shown.get(request, "")
        if not text.startswith(shown):
            # What was handed out stands: a tokenizer that rewrites earlier text gets its tail only.
            shown = text[: len(shown)]
        self._shown[request] = text
        return text[len(shown) :]


def listeners(streamer: Any, input_ids: Tensor) -> list[Callable[[Sequence[int], bool], None] | None]:
    """Returns one listener a request that feeds the streamer, after giving it the prompt as `generate` does.

    Args:
        streamer: a `BatchStreamer`, one of Transformers' for a single request, or None.
        input_ids: int64 [B, P].

    Raises:
        ValueError: a single-request streamer with several requests.
    """
    rows = len(input_ids)
    if streamer is None:
        return [None] * rows
    if isinstance(streamer, BatchStreamer):
        return [_batched(streamer, row) for row in range(rows)]
    if rows > 1:
        raise ValueError(
            f"streamer={type(streamer).__name__} is for one request and there are {rows}: "
            f"use hf_dcut.BatchStreamer(tokenizer)"
        )
    streamer.put(input_ids.cpu())
    return [lambda tokens, done: streamer.put(torch.tensor([list(tokens)]))]


def _batched(streamer: BatchStreamer, row: int) -> Callable[[Sequence[int], bool], None]:
    return lambda tokens, done: streamer.put(row, tokens, done)
