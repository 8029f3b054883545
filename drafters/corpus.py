"""`Corpus`: texts in which any run of tokens is found at once, and which grow while they are searched.

Of every place of a text the hashes of the 1, 2, .. K tokens that end there are kept in order, so that all places that
end alike are neighbours, and a binary search finds those of a whole batch at once. New texts come into a small index
that is made anew every few hundred tokens; full ones are joined to larger ones, so that there are few.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

# Odd, so that no token is lost when hashes overflow.
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
# New tokens after which they can be found, or this share of what is open; and tokens at which an open index is full.
_REFRESH, _SHARE, _FULL = 256, 8, 1 << 14
# An index is joined to the one before it unless that is so many times as large.
_RATIO = 4
# The oldest of about so many parts goes when a corpus is full.
_PARTS = 4


class Index:
    """Some texts, one behind the other.

    Args:
        tokens: int64 [N], with -1 behind each text.
        findable: bool [N], places at which a match may end.
        longest: K, tokens of the longest match.
    """

    def __init__(self, tokens: Tensor, findable: Tensor, longest: int):
        self.tokens, self.findable = tokens, findable
        place = torch.arange(len(tokens))
        before = torch.where(tokens < 0, place, -1).cummax(0).values
        # A match is of use where something follows it.
        ends = findable & (tokens >= 0) & (F.pad(tokens[1:], (0, 1), value=-1) >= 0)
        key = torch.zeros_like(tokens)
        self._keys, self._places = [], []
        for n in range(longest):
            key = key * _FACTOR + F.pad(tokens, (n, 0), value=-1)[: len(tokens)]
            places = (ends & (place - before > n)).nonzero().flatten()
            ordered, order = key[places].sort(stable=True)
            self._keys.append(ordered)
            self._places.append(places[order])

    def __len__(self) -> int:
        return len(self.tokens)

    def find(self, suffix: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Returns where the longest matches end, int64 [B, most], latest first, -1 behind them; and their n, int64 [B].

        Args:
            suffix: int64 [B, K], the last tokens of each request, the very last first; -1 where there are fewer.
            most: matches of a request that are of interest.
        """
        key, matching = torch.zeros_like(suffix[:, 0]), torch.zeros_like(suffix[:, 0])
        ends = suffix.new_full((len(suffix), most), -1)
        for n, (keys, places) in enumerate(zip(self._keys, self._places, strict=True)):
            key = key * _FACTOR + suffix[:, n]
            low, high = torch.searchsorted(keys, key), torch.searchsorted(keys, key, right=True)
            found = (high > low) & (suffix[:, n] >= 0)
            if not found.any():
                break
            at = high[:, None] - 1 - torch.arange(most)
            here = torch.where(at >= low[:, None], places[at.clamp_min(0)], -1)
            ends, matching = torch.where(found[:, None], here, ends), torch.where(found, n + 1, matching)
        return ends, matching

    def following(self, ends: Tensor, count: int) -> Tensor:
        """Returns the tokens behind each place, int64 [B, most, count]; -1 behind a text's end, and where no place is.

        Args:
            ends: int64 [B, most], as `find` returns them.
            count: tokens of each.
        """
        at = ends[..., None] + 1 + torch.arange(count)
        inside = (ends[..., None] >= 0) & (at < len(self))
        tokens = torch.where(inside, self.tokens[at.clamp_max(len(self) - 1)], -1)
        return torch.where((tokens >= 0).cummin(-1).values, tokens, -1)


class Corpus:
    """Texts that threads search and add to.

    Args:
        longest: K, tokens of the longest match.
        most_tokens: that are kept, separators included; beyond, about the oldest quarter is forgotten.

    Attributes:
        largest: token id that was ever added; -1 before the first.
    """

    def __init__(self, longest: int, most_tokens: int):
        self.longest, self.most_tokens, self.largest = longest, most_tokens, -1
        self._part = max(1, most_tokens // _PARTS)
        self._lock = threading.Lock()
        self._closed: list[Index] = []
        # Of the texts that are not in a closed index yet, the last few hundred tokens of which cannot be found.
        self._open: Index | None = None
        self._tokens: list[int] = []
        self._findable: list[bool] = []

    @property
    def indexes(self) -> Sequence[Index]:
        """What can be searched, the oldest texts first."""
        with self._lock:
            return [*self._closed, *([] if self._open is None else [self._open])]

    def add(self, texts: Iterable[Sequence[int]], context: int = 0) -> None:
        """Adds texts, which are found once there are a few hundred new tokens, two thousand at most.

        Args:
            texts: tokens of each.
            context: how many of the first ones were added before: they are there for matches that begin in them.

        Raises:
            ValueError: a negative token id.
        """
        with self._lock:
            for text in texts:
                if min(text, default=0) < 0:
                    raise ValueError(f"texts has the token id {min(text)}: give ids from 0 on, without padding")
                self.largest = max([self.largest, *text])
                self._tokens += [*text, -1]
                self._findable += [False] * context + [True] * (len(text) - context) + [False]
                if len(self._tokens) >= self._part:
                    self._close()
            known = 0 if self._open is None else len(self._open)
            if len(self._tokens) - known < max(_REFRESH, known // _SHARE):
                return
            if len(self._tokens) >= _FULL:
                self._close()
            else:
                self._open = self._index()

    def _close(self) -> None:
        """Closes the open index, joins it to those before that are about as large, and forgets what is too old."""
        self._closed.append(self._index())
        self._open, self._tokens, self._findable = None, [], []
        while len(self._closed) > 1 and len(self._closed[-2]) < min(self._part, _RATIO * len(self._closed[-1])):
            *self._closed, first, second = self._closed
            tokens, findable = torch.cat([first.tokens, second.tokens]), torch.cat([first.findable, second.findable])
            self._closed.append(Index(tokens, findable, self.longest))
        while sum(map(len, self._closed)) > self.most_tokens:
            del self._closed[0]

    def _index(self) -> Index:
        """Returns an index of the open texts."""
        return Index(torch.tensor(self._tokens), torch.tensor(self._findable), self.longest)
