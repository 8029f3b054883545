"""Does confidence tell acceptance? The paper's figure 7: every drafted position of full verification, by its score.

Ranking is what the cut needs (AUROC, Spearman). Calibration, that of the positions with survival 0.6 about 60% are
accepted, is what the choice of a budget needs (ECE, and the bins of the reliability plot).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_dcut.bench.replay import Replay

BINS = 10


@dataclass(frozen=True)
class Calibration:
    """How a score in [0, 1] and what came of it go together.

    Attributes:
        positions: how many.
        accepted: share that was accepted.
        score: mean score.
        ece: expected calibration error: how far the bins' mean scores are from their shares, weighted by size.
        auroc: how often an accepted position scores higher than a rejected one; None when there is only one kind.
        spearman: correlation of the ranks of score and outcome; None likewise.
        bins: mean score, accepted share and size of each bin that is not empty.
    """

    positions: int
    accepted: float
    score: float
    ece: float
    auroc: float | None
    spearman: float | None
    bins: tuple[tuple[float, float, int], ...]


def calibration(score: Tensor, accepted: Tensor, bins: int = BINS) -> Calibration:
    """Returns the measures of `score` float [n] in [0, 1] against `accepted` bool [n]."""
    score, hit = score.double(), accepted.double()
    place = (score * bins).long().clamp(0, bins - 1)
    size = torch.bincount(place, minlength=bins)
    used = size > 0
    means = torch.bincount(place, score, bins)[used] / size[used]
    shares = torch.bincount(place, hit, bins)[used] / size[used]
    error = ((means - shares).abs() * size[used]).sum() / max(len(score), 1)
    return Calibration(
        positions=len(score),
        accepted=float(hit.mean()),
        score=float(score.mean()),
        ece=float(error),
        auroc=_auroc(score, accepted),
        spearman=_spearman(score, hit),
        bins=tuple(zip(means.tolist(), shares.tolist(), size[used].tolist(), strict=True)),
    )


def of_replay(steps: Replay) -> dict[str, Calibration]:
    """Returns the measures of survival against acceptance, over all places ("all") and for each place from 1."""
    found = {"all": calibration(steps.survival[steps.offered], steps.accepted[steps.offered])}
    for place in range(steps.offered.shape[1]):
        there = steps.offered[:, place]
        if there.any():
            found[str(place + 1)] = calibration(steps.survival[there, place], steps.accepted[there, place])
    return found


def mean_curve(replays: Sequence[Replay]) -> Calibration:
    """Returns the measures of several replays taken together."""
    return calibration(
        torch.cat([r.survival[r.offered] for r in replays]), torch.cat([r.accepted[r.offered] for r in replays])
    )


def plot(curves: dict[str, Calibration], path: str | os.PathLike[str]) -> None:
    """Draws reliability curves, accepted share over score, into an image file.

    Args:
        curves: by the name in the legend.
        path: its ending chooses the format.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"plot={os.fspath(path)!r} needs matplotlib: pip install 'hf-dcut[bench]'") from error
    figure = Figure(figsize=(5, 5))
    axes = figure.add_subplot(xlabel="score: product of confidences", ylabel="accepted share", xlim=(0, 1), ylim=(0, 1))
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle="--")
    for name, curve in curves.items():
        scores, shares, _ = zip(*curve.bins, strict=True)
        axes.plot(scores, shares, marker="o", markersize=3, label=f"{name} (ECE {curve.ece:.3f})")
    axes.legend(fontsize=8)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", dpi=120)


def table(found: dict[str, Calibration]) -> list[dict[str, Any]]:
    """Returns the measures as JSON-able lines, one a place."""
    return [{"place": name, **vars(entry)} for name, entry in found.items()]


def _ranks(values: Tensor) -> Tensor:
    """Returns ranks from 1, equal values sharing the mean of theirs: 3, 5, 5 have 1, 2.5, 2.5."""
    _, index, count = values.unique(sorted=True, return_inverse=True, return_counts=True)
    last = count.cumsum(0)
    return (last - (count - 1) / 2)[index]


def _auroc(score: Tensor, accepted: Tensor) -> float | None:
    yes, no = int(accepted.sum()), int((~accepted).sum())
    if not yes or not no:
        return None
    return float((_ranks(score)[accepted].sum() - yes * (yes + 1) / 2) / (yes * no))


def _spearman(score: Tensor, outcome: Tensor) -> float | None:
    pair = torch.stack((_ranks(score), _ranks(outcome)))
    if len(score) < 2 or not bool((pair.std(1) > 0).all()):
        return None
    return float(torch.corrcoef(pair)[0, 1])
