"""What recorded drafts say, against plain loops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hf_dcut.bench.analysis import accepted_lengths, auroc, draft_places, equal_budgets, spearman
from hf_dcut.bench.trace import Trace


def test_areas_and_ranks_against_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    score = torch.randint(6, (60,), generator=generator).float()
    label = torch.rand(60, generator=generator) < 0.1 + score / 8
    pairs = [(p, n) for p in score[label].tolist() for n in score[~label].tolist()]
    wanted = sum((p > n) + 0.5 * (p == n) for p, n in pairs) / len(pairs)
    assert auroc(score, label) == pytest.approx(wanted)
    assert auroc(score, torch.ones(60, dtype=torch.bool)) is None

    def rank(values: list[float]) -> torch.Tensor:
        return torch.tensor([sum(v < w for v in values) + (sum(v == w for v in values) + 1) / 2 for w in values])

    x, y = rank(score.tolist()), rank(label.float().tolist())
    assert spearman(score, label) == pytest.approx(float(torch.corrcoef(torch.stack([x, y]))[0, 1]), abs=1e-6)


def test_places_of_steps_that_verify_everything() -> None:
    confidence = torch.tensor([[0.5, 0.5], [0.9, 0.9], [0.8, 0.25], [0.6, 0.6]])
    right = torch.tensor([[True, False], [False, False], [True, False], [False, False]])
    trace = Trace(3, 5, 5, confidence, torch.tensor([2, 2, 2, 2]), right)
    # Steps begin after 1 and 3 of the 5 tokens, so that two are left for the drafts of the second.
    survival, accepted = draft_places([trace])
    assert survival.tolist() == pytest.approx([0.5, 0.25, 0.8, 0.2])
    assert accepted.tolist() == [True, False, True, False]
    assert accepted_lengths(trace) == [1, 1]


def test_places_behind_an_answers_end_do_not_count() -> None:
    right = torch.tensor([[False] * 4, [True, *[False] * 3]])
    trace = Trace(3, 9, 3, torch.full((2, 4), 0.5), torch.tensor([4, 4]), right)
    survival, accepted = draft_places([trace])
    assert survival.tolist() == [0.5, 0.25, 0.5]
    assert accepted.tolist() == [False, False, True]


def test_the_global_cut_gains_where_requests_differ(make_traces: Callable[..., list[Trace]]) -> None:
    mixed = equal_budgets(make_traces(24, tokens=40, depth=7), 8)
    assert [e.share for e in mixed] == [0.25, 0.5, 0.75]
    for e in mixed[:2]:
        assert e.gain.low is not None
        assert e.gain.low > 1.02
        assert e.gain.value == pytest.approx(e.cut / e.uniform)
    # Where every draft is as sure as every other, uniform depth is the global cut.
    alike = make_traces(16, tokens=40, depth=7, moods=(1.0,))
    for trace in alike:
        trace.confidence.fill_(0.5)
    (low, *_) = equal_budgets(alike, 8)
    assert low.gain.value == pytest.approx(1.0, abs=0.02)
