"""Live requests fill slots 0, 1, .. whatever happens; those who wait are admitted in their order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcut.media import Media, Prompts
from hf_dcut.requests import Request
from hf_dcut.scheduling import Roster, chunks_of, common_cells, source_of, steps_left

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


def test_those_who_wait_begin_where_a_slot_is_free_first() -> None:
    assert steps_left([5, 3, 4], []) == 5
    assert steps_left([5, 3, 4], [6]) == 9, "behind the shortest"
    assert steps_left([5, 3, 4], [6, 2, 4]) == 9, "6 ends at 9, 2 at 6, 4 behind 5 at 9"


def test_the_end_comes_nearer_with_the_request_that_is_last() -> None:
    roster = Roster(slots=2)
    for i in range(2):
        roster.add(Request(id=i, prompt=[0], max_new_tokens=9))
    roster.admit()
    read_some(roster, 2)
    for request, added in zip(roster.live, (1, 4), strict=True):
        request.append([0] * added, NONE)
    assert roster.nearer(roster.live, (1, 4)) == 1, "the other one has as much left as before, but for a token"
    roster.add(Request(id=2, prompt=[0], max_new_tokens=9))
    assert roster.nearer(roster.live, (1, 4)) == 4, "the third follows the second, and ends last"
    both, roster.slots = list(roster.live), 3
    roster.add(Request(id=3, prompt=[0], max_new_tokens=30, priority=1))
    roster.admit()
    assert roster.nearer(both, (1, 4)) == 0, "one that still reads has more left than all"
    for i in range(24):
        roster.add(Request(id=i + 4, prompt=[0], max_new_tokens=9))
    assert roster.nearer(both, (1, 4)) is None, "8 a slot and one more"


# Reading.


def live(*requests: Request) -> list[Request]:
    """Returns the requests in slots 0, 1, .."""
    for slot, request in enumerate(requests):
        request.slot = slot
    return list(requests)


def test_waiting_is_by_priority_then_by_arrival_also_for_those_that_lost_their_slot() -> None:
    roster = Roster(slots=3)
    for i, priority in enumerate([0, 1, 0, 2, 0]):
        roster.add(Request(id=i, prompt=[0], max_new_tokens=1, priority=priority))
    roster.admit()
    assert [r.id for r in roster.live] == [3, 1, 0]
    assert [r.id for r in roster.waiting] == [2, 4]
    back = roster.live[2]
    roster.release([back])
    back.lose_slot()
    roster.add(back)
    assert [r.id for r in roster.waiting] == [0, 2, 4]
    roster.release([roster.waiting[1]])
    assert [r.id for r in roster.waiting] == [0, 4]


def test_of_those_admitted_together_the_ones_that_will_copy_come_last() -> None:
    roster = Roster(slots=9)
    for i, prompt in enumerate([[1, 2], [1, 2], [3, 4], [1, 2], [3, 4], [5]]):
        roster.add(Request(id=i, prompt=prompt, max_new_tokens=1))
    roster.admit()
    assert [r.id for r in roster.live] == [0, 2, 5, 1, 3, 4]
    assert [r.slot for r in roster.live] == list(range(6))


def test_pieces_fill_the_limit_and_end_in_logits_only_at_the_end_of_a_prompt() -> None:
    half = Request(id=0, prompt=[1, 2, 3, 4], max_new_tokens=9, read=2)
    resumed = Request(id=1, prompt=[5, 6], max_new_tokens=9, tokens=[7, 8, 9])
    resumed.lose_slot()
    long = Request(id=2, prompt=list(range(10, 30)), max_new_tokens=9)
    chunks = chunks_of(live(half, resumed, long), 9)
    assert [c.token.tolist() for c in chunks] == [[3, 4], [5, 6, 7, 8], [10, 11, 12]]
    assert [(c.slot, c.first, c.last) for c in chunks] == [(0, 2, True), (1, 0, False), (2, 0, False)]
    assert chunks_of(live(half, resumed, long), 2)[-1].slot == 0


def test_a_prompt_that_one_reads_is_not_begun_by_another() -> None:
    first, second = (Request(id=i, prompt=[1, 2, 3], max_new_tokens=9) for i in range(2))
    other, third = Request(id=2, prompt=[4], max_new_tokens=9), Request(id=3, prompt=[4], max_new_tokens=9)
    assert [c.slot for c in chunks_of(live(first, other, third, second), 99)] == [0, 1, 2], "one token is not shared"
    first.read = 2
    assert source_of(second, [first, second]) is first, "the last token is read by each"
    assert common_cells(second) == 2
    second.read = 2
    assert [c.token.tolist() for c in chunks_of(live(first, second), 99)] == [[3], [3]]


def test_prompts_with_media_are_read_whole_and_by_call() -> None:
    one, two = (Prompts({}, torch.zeros(2, 4)) for _ in range(2))

    def sighted(id: int, prompts: Prompts, tokens: Sequence[int] = ()) -> Request:
        media = Media(prompts, row=id, pads=0, rope=-2)
        request = Request(id, [1, 2, 3], 9, rope=-2, media=media, tokens=list(tokens))
        request.lose_slot()
        return request

    first, second, other = sighted(0, one), sighted(1, one), sighted(2, two)
    blind = Request(id=3, prompt=[1, 2, 3], max_new_tokens=9)
    chunks = chunks_of(live(first, second, other, blind), 1)
    assert [(c.slot, c.token.tolist(), c.rope, c.last) for c in chunks] == [
        (0, [1, 2, 3], -2, True),
        (1, [1, 2, 3], -2, True),
    ], "the limit does not split them"
    assert [c.media for c in chunks] == [first.media, second.media]
    assert [c.media for c in chunks_of(live(blind, first), 9)] == [None], "text first, by itself"
    first.read = 3
    assert source_of(second, live(first, second)) is None, "equal tokens may be other images"
    # One that lost its slot goes on reading its own tokens, so none behind it may decode before it.
    resumed, last = sighted(4, one, [7, 8, 9]), sighted(5, one, [7])
    assert [(c.slot, c.last) for c in chunks_of(live(last, resumed, second), 9)] == [(0, False), (1, False)]
    resumed.read = 3
    assert [(c.token.tolist(), c.first, c.media) for c in chunks_of(live(resumed), 9)] == [([7, 8], 3, None)]


def test_nothing_is_copied_before_all_of_it_is_there_nor_from_another_prompt() -> None:
    reads = Request(id=0, prompt=[1, 2, 3, 4], max_new_tokens=9, read=2)
    same, other = (Request(id=i, prompt=p, max_new_tokens=9) for i, p in ((1, [1, 2, 3, 4]), (2, [1, 2, 3, 5])))
    assert source_of(same, live(reads, same, other)) is None
    reads.read = 3
    assert source_of(same, live(reads, same, other)) is reads
    assert source_of(other, live(reads, same, other)) is None


def test_a_resumed_request_copies_the_whole_prompt_and_reads_its_own_tokens() -> None:
    decodes = Request(id=0, prompt=[1, 2, 3], max_new_tokens=9, read=3, tokens=[7, 8])
    resumed = Request(id=1, prompt=[1, 2, 3], max_new_tokens=9, tokens=[4, 5, 6])
    resumed.lose_slot()
    assert (resumed.resumed, resumed.unread, resumed.decoding) == (2, [1, 2, 3, 4, 5], False)
    assert (source_of(resumed, live(decodes, resumed)), common_cells(resumed)) == (decodes, 3)
    resumed.read = 5
    assert (resumed.decoding, resumed.length, resumed.room) == (True, 5, 5)
    resumed.append([7, 8], NONE)
    assert resumed.length == 7


def test_a_slot_that_is_copied_whole_is_read_up_to_there_and_no_further() -> None:
    first, second, third = (Request(id=i, prompt=[1, 2, 3, 4], max_new_tokens=9) for i in range(3))
    other = Request(id=3, prompt=[5, 6], max_new_tokens=9)
    everyone = live(first, other, second, third)
    chunks = chunks_of(everyone, 99, exact=True)
    assert [c.token.tolist() for c in chunks] == [[1, 2, 3]], "others must not be read before one in front of them"
    assert not chunks[0].last
    assert [c.token.tolist() for c in chunks_of(everyone, 2, exact=True)] == [[1, 2]]
    first.read = 2
    assert source_of(second, everyone, exact=True) is None
    first.read = 3
    assert source_of(second, everyone, exact=True) is first
    second.read = third.read = 3
    assert [c.token.tolist() for c in chunks_of(everyone, 99, exact=True)] == [[4], [5, 6], [4], [4]]
    first.read = 4
    first.append([7, 8], NONE)
    third.read = 0
    assert source_of(third, everyone, exact=True) is second, "the first went on from there"


def test_a_prompt_that_went_past_what_another_wants_is_not_waited_for() -> None:
    resumed = Request(id=0, prompt=[1, 2, 3], max_new_tokens=9, tokens=[7, 8, 9])
    resumed.lose_slot()
    fresh = Request(id=1, prompt=[1, 2, 3], max_new_tokens=9)
    everyone = live(resumed, fresh)
    assert [c.token.tolist() for c in chunks_of(everyone, 99, exact=True)] == [[1, 2]]
    resumed.read = 4
    assert source_of(fresh, everyone, exact=True) is None
    assert [c.token.tolist() for c in chunks_of(everyone, 99, exact=True)] == [[8], [1, 2, 3]]
