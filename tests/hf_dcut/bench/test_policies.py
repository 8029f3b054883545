"""Other ways to cut: what each keeps, and that the global one expects more drafts of as many positions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hf_dcut.bench.policies import Capacity, Threshold, Uniform, limited, rule_of
from hf_dcut.budget import cut
from hf_dcut.scores import score
from hf_dcut.types import Batch, Drafts, Scores

SURVIVAL = [[0.9, 0.5, 0.1], [0.4, 0.2, 0.0], [0.8, 0.8, 0.8]]


@pytest.fixture
def scores() -> Scores:
    """Three requests, the second with two drafts, the third with room for one."""
    valid = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    return Scores(torch.tensor(SURVIVAL) * valid, valid)


@pytest.mark.parametrize(
    ("method", "kept"),
    [
        ("uniform-1", [1, 1, 1]),
        ("uniform-2", [2, 2, 1]),
        ("uniform-9", [3, 2, 1]),
        ("threshold-0.5", [2, 0, 1]),
        ("threshold-0.15", [2, 2, 1]),
        ("threshold-0", [3, 2, 1]),
        ("tetris-3", [0, 0, 0]),
        ("tetris-4", [1, 0, 0]),
        ("tetris-6", [2, 0, 1]),
        ("tetris-99", [3, 2, 1]),
    ],
)
def test_what_a_policy_keeps(method: str, kept: list[int], scores: Scores) -> None:
    budget, policy = rule_of(method)
    assert budget == 1.0
    assert policy is not None
    assert policy(scores).tolist() == kept


def test_budgets_have_no_policy() -> None:
    assert [rule_of(m) for m in ("plain", "auto", "0.25", "1")] == [
        ("none", None),
        ("auto", None),
        (0.25, None),
        (1.0, None),
    ]


@pytest.mark.parametrize(
    "method", ["fast", "uniform", "uniform-0", "uniform-1.5", "tetris-x", "threshold-2", "0", "1.5", "-1"]
)
def test_other_names_are_refused(method: str) -> None:
    with pytest.raises(ValueError, match=f"method '{method}': give plain, auto"):
        rule_of(method)


@pytest.mark.parametrize("policy", [Uniform(1), Uniform(3), Capacity(12), Threshold(0.3), Threshold(0.05)])
def test_no_policy_expects_more_drafts_of_as_many_positions(
    policy: Uniform | Capacity | Threshold, make_batch: Callable[..., Batch]
) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        confidence = torch.rand(6, 5, generator=generator)
        room = torch.randint(0, 6, (6,), generator=generator).tolist()
        drafts = Drafts.chain(torch.zeros(6, 5, dtype=torch.int64), confidence)
        scored = score(drafts, make_batch([3] * 6, room=room))
        kept = policy(scored)
        total = 6 + int(kept.sum())
        theirs = sum(scored.survival[i, :k].sum() for i, k in enumerate(kept.tolist()))
        ours = cut(scored, (total / 36,))
        assert ours.total == total
        assert scored.survival[ours.keep].sum() >= theirs - 1e-6  # float32 sums in another order


def test_limited_drafts_say_what_is_kept(make_batch: Callable[..., Batch]) -> None:
    drafts = Drafts.chain(torch.arange(8).view(2, 4), torch.tensor([[0.9, 0.9, 0.9, 1.0], [0.5, 0.1, 1.0, 1.0]]))
    batch = make_batch([3, 3])
    less = limited(Threshold(0.3), 3)(drafts, batch)
    assert less.count.tolist() == [3, 1]
    assert less.token.tolist() == [[0, 1, 2], [4, 5, 6]]
    broken = Drafts.chain(drafts.token, drafts.confidence.index_fill(1, torch.tensor(1), torch.nan))
    assert limited(Threshold(0.3), 3)(broken, batch).confidence.isnan().any()
