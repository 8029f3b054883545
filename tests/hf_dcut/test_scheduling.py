"""Live requests fill slots 0, 1, .. whatever happens; those who wait are admitted in their order."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcut.requests import Request
from hf_dcut.scheduling import Roster

NONE = torch.zeros(0, 5)  # scores that nobody keeps


def read_some(roster: Roster, cells: int) -> None:
    """Reads prompts in slot order, as a step does: the next begins once the one before it is read."""
    for request in roster.reading:
        piece = min(cells, len(request.prompt) - request.read)
        request.read += piece
        cells -= piece
        if request.decoding:
            request.append([0], NONE)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_live_requests_fill_the_first_slots_decoding_ones_first(data: st.DataObject) -> None:
    roster = Roster(slots=data.draw(st.integers(1, 5), "slots"))
    prompts = data.draw(st.lists(st.integers(1, 6), max_size=12), "prompt lengths")
    everyone = [Request(id=i, prompt=[0] * n, max_new_tokens=100) for i, n in enumerate(prompts)]
    for request in everyone:
        roster.add(request)
    finished: list[Request] = []
    content: dict[int, int] = {}  # what each slot holds, as a cache would: written when admitted, copied by moves
    while roster.live or roster.waiting:
        already = len(roster.live)
        roster.admit()
        content |= {request.slot: request.id for request in roster.live[already:]}
        read_some(roster, data.draw(st.integers(1, 8), "cells"))
        ending = [r for r in roster.decoding if data.draw(st.booleans(), "ends") or len(r.tokens) > 5]
        for request in roster.decoding:
            request.append([0], NONE)
        for request in ending:
            request.finish_reason = "eos"
        for source, destination in roster.release([r for r in roster.live if r.finish_reason]):
            content[destination] = content[source]
        finished += ending
        assert [request.slot for request in roster.live] == list(range(len(roster.live)))
        assert roster.live == roster.decoding + roster.reading
        assert [content[request.slot] for request in roster.live] == [request.id for request in roster.live]
        assert all(request.slot == -1 for request in ending)
        assert {*roster.live, *roster.waiting, *finished} == set(everyone)
        assert not roster.waiting or ending or len(roster.live) == roster.slots
    assert len(finished) == len(everyone)


def test_those_who_wait_come_first_come_first_served() -> None:
    roster = Roster(slots=2)
    for i in range(4):
        roster.add(Request(id=i, prompt=[0], max_new_tokens=1))
    order = []
    while roster.live or roster.waiting:
        roster.admit()
        read_some(roster, 1)
        order += [request.id for request in roster.live if request.finish_reason]
        roster.release([r for r in roster.live if r.finish_reason])
    assert order == [0, 1, 2, 3]
