"""The corpus finds what a plain search finds, while it grows, and forgets the oldest."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcut.drafters.corpus import Corpus, Index

LONGEST = 4


def index_of(texts: list[list[int]], contexts: list[int] | None = None) -> Index:
    tokens = [token for text in texts for token in (*text, -1)]
    found = [
        place >= context and place < len(text)
        for text, context in zip(texts, contexts or [0] * len(texts), strict=True)
        for place in range(len(text) + 1)
    ]
    return Index(torch.tensor(tokens), torch.tensor(found), LONGEST)


def searched(texts: list[list[int]], suffix: list[int]) -> tuple[list[int], int]:
    """Returns, by comparing tokens one by one, where the longest matches end among all tokens, latest first, and n."""
    for n in range(min(LONGEST, len(suffix)), 0, -1):
        ends, start = [], 0
        for text in texts:
            ends += [start + end for end in range(n - 1, len(text) - 1) if text[end - n + 1 : end + 1] == suffix[-n:]]
            start += len(text) + 1
        if ends:
            return ends[::-1], n
    return [], 0


def reversed_rows(suffixes: list[list[int]]) -> torch.Tensor:
    return torch.tensor([([-1] * LONGEST + suffix)[::-1][:LONGEST] for suffix in suffixes])


TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@given(texts=st.lists(TEXT, min_size=1, max_size=5), suffixes=st.lists(TEXT, min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_the_longest_matches_are_found(texts: list[list[int]], suffixes: list[list[int]]) -> None:
    ends, matching = index_of(texts).find(reversed_rows(suffixes), 50)
    for row, suffix in enumerate(suffixes):
        expected, n = searched(texts, suffix)
        assert [end for end in ends[row].tolist() if end >= 0] == expected
        assert matching[row] == n


def test_only_the_latest_matches_are_of_interest() -> None:
    ends, _ = index_of([[1, 2, 1, 2, 1, 2]]).find(reversed_rows([[1]]), 2)
    assert ends.tolist() == [[4, 2]]


def test_what_follows_ends_with_its_text() -> None:
    index = index_of([[1, 2, 3], [1, 4]])
    ends, _ = index.find(reversed_rows([[1], [9]]), 3)
    assert index.following(ends, 3).tolist() == [[[4, -1, -1], [2, 3, -1], [-1] * 3], [[-1] * 3] * 3]


def test_matches_begin_in_a_context_but_do_not_end_there() -> None:
    index = index_of([[1, 2, 3, 4]], contexts=[2])
    ends, matching = index.find(reversed_rows([[1], [1, 2, 3]]), 1)
    assert ends.tolist() == [[-1], [2]]
    assert matching.tolist() == [0, 3]


def test_texts_are_found_once_there_are_enough_of_them() -> None:
    corpus = Corpus(LONGEST, 1 << 20)
    corpus.add([[1, 2, 3]])
    assert not corpus.indexes
    corpus.add([[5, 6, 7]] * 80)
    (index,) = corpus.indexes
    assert index.find(reversed_rows([[1, 2]]), 1)[1].tolist() == [2]


def test_there_are_few_indexes_and_the_oldest_texts_are_forgotten() -> None:
    corpus = Corpus(LONGEST, 40_000)
    for number in range(2_000):
        corpus.add([[number] * 50])
    sizes = [len(index) for index in corpus.indexes]
    assert 20_000 <= sum(sizes) <= 60_000
    assert len(sizes) <= 8
    known = [any(i.find(reversed_rows([[n, n]]), 1)[1].item() == 2 for i in corpus.indexes) for n in range(2_000)]
    assert known == sorted(known), "what is forgotten is older than what is not"
    assert not known[0]
    assert known[1_900]


def test_much_at_once_is_kept_as_far_as_there_is_room() -> None:
    corpus = Corpus(LONGEST, 1_000)
    corpus.add([[number] * 9 for number in range(500)])
    assert 500 <= sum(map(len, corpus.indexes)) <= 1_300
    assert corpus.indexes[-1].find(reversed_rows([[499, 499]]), 1)[1].item() == 2


@pytest.mark.parametrize("workers", [4])
def test_threads_add_and_search_at_once(workers: int) -> None:
    corpus = Corpus(LONGEST, 1 << 20)
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(200):
                corpus.add([[number, step, number, step, number]])
                for index in corpus.indexes:
                    index.find(reversed_rows([[number, step]]), 4)
        except BaseException as error:  # noqa: BLE001 (handed to the test's own thread)
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    tokens = torch.cat([index.tokens for index in corpus.indexes]).tolist()
    assert len(tokens) > 6 * 200 * workers - 256
