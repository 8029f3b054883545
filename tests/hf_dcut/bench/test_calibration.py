"""Measures of confidence against plain loops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_dcut.bench.calibration import calibration, of_replay, plot
from hf_dcut.bench.replay import Replay


def test_measures_against_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    # One decimal, so that scores are equal now and then.
    score = (torch.rand(60, generator=generator) * 10).round() / 10
    accepted = torch.rand(60, generator=generator) < score
    found = calibration(score, accepted, bins=5)
    yes, no = score[accepted].tolist(), score[~accepted].tolist()
    wins = sum((a > b) + (a == b) / 2 for a in yes for b in no)
    assert found.auroc == pytest.approx(wins / len(yes) / len(no))
    error = 0.0
    for index in range(5):
        here = [i for i in range(60) if min(4, int(float(score[i].double()) * 5)) == index]
        if here:
            mean, share = (sum(float(x[i]) for i in here) / len(here) for x in (score, accepted))
            error += len(here) / 60 * abs(mean - share)
    assert found.ece == pytest.approx(error, abs=1e-6)
    assert sum(size for _, _, size in found.bins) == found.positions == 60

    def ranks(values: list[float]) -> list[float]:
        return [sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2 for x in values]

    a, b = ranks(score.tolist()), ranks(accepted.float().tolist())
    mean_a, mean_b = sum(a) / 60, sum(b) / 60
    cross = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    norms = sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b)
    assert found.spearman == pytest.approx(cross / norms**0.5)


def test_a_perfect_and_a_useless_score() -> None:
    accepted = torch.tensor([True, True, False, False])
    perfect = calibration(torch.tensor([1.0, 1.0, 0.0, 0.0]), accepted)
    assert (perfect.ece, perfect.auroc, perfect.spearman) == pytest.approx((0.0, 1.0, 1.0))
    flat = calibration(torch.full((4,), 0.9), accepted)
    assert (flat.ece, flat.auroc, flat.spearman) == (pytest.approx(0.4), 0.5, None)


def test_one_kind_of_outcome_has_no_ranking() -> None:
    found = calibration(torch.tensor([0.2, 0.9]), torch.tensor([True, True]))
    assert (found.auroc, found.spearman) == (None, None)
    assert found.ece == pytest.approx(0.45)


def test_places_without_a_draft_are_left_out() -> None:
    confidence = torch.tensor([[0.5, 0.5], [0.9, 0.1]])
    right = torch.tensor([[True, False], [False, False]])
    offered = torch.tensor([[True, True], [True, False]])
    found = of_replay(Replay(confidence, right, offered, offered | True, torch.tensor([2, 1])))
    assert {name: entry.positions for name, entry in found.items()} == {"all": 3, "1": 2, "2": 1}
    assert found["2"].score == pytest.approx(0.25)


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `bench`")
    curve = calibration(torch.tensor([0.1, 0.9, 0.4]), torch.tensor([False, True, True]))
    plot({"a drafter": curve}, tmp_path / "sub" / "curve.png")
    assert (tmp_path / "sub" / "curve.png").stat().st_size > 1000
