"""Who is live, who waits, and what is read next.

Live requests fill slots 0, 1, ..: those that decode first, then those that read. Those who wait are admitted by
priority, then by arrival; one that lost its slot keeps its arrival, so it comes back before those behind it. Every live
request that decodes takes part in every step, and beside them at most `limit` tokens are read. So a running request
gets at least one token a step, and no step is longer than one of B (D+1) + `limit` packed tokens.
"""

from __future__ import annotations

import heapq
import time
from bisect import insort
from collections.abc import Collection, Sequence

import torch

from hf_dcut.media import Media, Prompts
from hf_dcut.packing import Chunk
from hf_dcut.requests import Request

# Waiting requests for each slot beyond which the end of the last one is not looked for.
_LONG_QUEUE = 8


class Roster:
    """Live and waiting requests.

    Args:
        slots: how many can be live at once.
    """

    def __init__(self, slots: int):
        self.slots = slots
        self.live: list[Request] = []
        self.waiting: list[Request] = []
        self._arrivals = 0

    @property
    def decoding(self) -> list[Request]:
        """Live requests that have read their prompts, in slot order."""
        return [request for request in self.live if request.decoding]

    @property
    def reading(self) -> list[Request]:
        """Live requests that still read their prompts, in slot order."""
        return [request for request in self.live if not request.decoding]

    def add(self, request: Request) -> None:
        """Lets a request wait for a slot."""
        if request.arrival < 0:
            request.arrival = self._arrivals
            self._arrivals += 1
        insort(self.waiting, request, key=lambda r: (-r.priority, r.arrival))

    def admit(self) -> None:
        """Gives free slots to those who wait; of those, the ones whose prompt another of them reads come last."""
        free = max(0, self.slots - len(self.live))
        admitted, self.waiting = self.waiting[:free], self.waiting[free:]
        first = [r for i, r in enumerate(admitted) if all(r.prompt != other.prompt for other in admitted[:i])]
        for request in [*first, *(r for r in admitted if r not in first)]:
            request.slot = len(self.live)
            request.admitted = request.admitted or time.perf_counter()
            self.live.append(request)

    def release(self, leaving: Collection[Request]) -> list[tuple[int, int]]:
        """Lets requests go; returns the moves (source, destination) that close the gaps in the slots, in order."""
        moves: list[tuple[int, int]] = []
        for request in leaving:
            hole = request.slot
            if hole < 0:
                self.waiting.remove(request)
                continue
            for last in (self._last(decoding=True), len(self.live) - 1):
                # The last decoding request takes the hole, the last of all takes that one's place.
                if hole < last:
                    self.live[hole] = self.live[last]
                    self.live[hole].slot = hole
                    moves.append((last, hole))
                    hole = last
            self.live.pop()
            request.slot = -1
        return moves

    def nearer(self, decoding: Sequence[Request], added: Sequence[int]) -> int | None:
        """Returns by how many plain steps the end of the last request came nearer; None where too many wait to tell.

        Args:
            decoding: requests of the step, ended ones too.
            added: tokens that it gave them.
        """
        waiting = [request.left for request in self.waiting]
        if len(waiting) > _LONG_QUEUE * self.slots:
            return None
        reading = [request.left for request in self.reading]
        after = [request.left for request in decoding]
        before = [left + count for left, count in zip(after, added, strict=True)]
        return steps_left(before + reading, waiting) - steps_left(after + reading, waiting)

    def _last(self, decoding: bool) -> int:
        return max((r.slot for r in self.live if r.decoding == decoding), default=-1)


def steps_left(left: Sequence[int], waiting: Sequence[int]) -> int:
    """Returns how many plain steps it takes until the last request ends, prompts aside.

    Args:
        left: tokens that each live request can still get.
        waiting: the same of those who wait, in order; each takes the slot that is free first.
    """
    ends = list(left)
    heapq.heapify(ends)
    for tokens in waiting:
        heapq.heapreplace(ends, ends[0] + tokens)
    return max(ends)


def source_of(request: Request, live: Sequence[Request], exact: bool = False) -> Request | None:
    """Returns who holds the cells that a live request, which has read nothing, can copy; None if nobody does.

    Requests with equal prompts read it once.

    Args:
        request: the request.
        live: all that hold slots.
        exact: whether slots can only be copied whole, so that the holder must have those cells and no more.
    """
    wanted = common_cells(request)

    def holds(other: Request) -> bool:
        return other.length == wanted if exact else other.read >= wanted

    return next((r for r in live if wanted and holds(r) and r is not request and _twins(r, request)), None)


def common_cells(request: Request) -> int:
    """Returns how many cells a request can have copied: its prompt's, but one token it reads itself for the logits."""
    return min(len(request.prompt), len(request.prompt) + request.resumed - 1)


def chunks_of(reading: Sequence[Request], limit: int, exact: bool = False) -> list[Chunk]:
    """Returns the pieces of prompts that are read next, in slot order, at most `limit` tokens.

    A request does not begin on a prompt that one before it still reads: it will copy it. Nor does it begin before those
    in front of it are read: decoding requests lie in the first slots. Prompts with media come whole, those of one call
    together and without others.

    Args:
        reading: live requests that still read.
        limit: tokens in all.
        exact: whether slots can only be copied whole, so that a piece ends where another request will copy.
    """
    first = _unseen(reading[0]) if reading else None
    if first is not None:
        return _whole_prompts(reading, first.prompts)
    chunks: list[Chunk] = []
    for index, request in enumerate(reading):
        piece = request.unread[: min(limit, _until_copied(request, reading[index + 1 :])) if exact else limit]
        if not piece or _waits(request, reading[:index]) or _unseen(request):
            break
        whole = len(piece) == len(request.unread)
        last = whole and not request.tokens
        chunks.append(Chunk(torch.tensor(piece), request.slot, request.read, request.rope, last))
        limit -= len(piece)
        if not whole:
            break
    return chunks


def _whole_prompts(reading: Sequence[Request], prompts: Prompts) -> list[Chunk]:
    """Returns the prompts of the first requests, of one call; the last may go on reading behind its own."""
    chunks: list[Chunk] = []
    for request in reading:
        media = _unseen(request)
        if media is None or media.prompts is not prompts:
            break
        last = not request.tokens
        chunks.append(Chunk(torch.tensor(request.prompt), request.slot, 0, request.rope, last, media))
        if request.resumed:
            break
    return chunks


def _unseen(request: Request) -> Media | None:
    """Returns the media of a request that are still to be read."""
    return None if request.read else request.media


def _waits(request: Request, before: Sequence[Request]) -> bool:
    """Returns whether one before a request that has read nothing still reads what the request will copy."""
    wanted = common_cells(request)
    return not request.read and any(r.read < wanted and _twins(r, request) for r in before)


def _until_copied(request: Request, behind: Sequence[Request]) -> int:
    """Returns how many tokens a request may read until one behind it, which waits for that, copies them."""
    ends = [common_cells(r) - request.read for r in behind if not r.read and _twins(r, request)]
    return min((end for end in ends if end > 0), default=len(request.unread))


def _twins(one: Request, other: Request) -> bool:
    text = one.media is None and other.media is None
    return text and one.prompt == other.prompt and one.rope == other.rope
