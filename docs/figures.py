"""The five figures of docs/idea.md, drawn from what the package itself computes: `python docs/figures.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from hf_dcut.bench.surface import published
from hf_dcut.budget import cut, positions
from hf_dcut.cost_table import CostTable
from hf_dcut.scores import score
from hf_dcut.types import Batch, Cut, Drafts, Scores

FOLDER = Path(__file__).with_name("figures")
RATIOS = (0.25, 0.5, 0.75, 1.0)
DARK, LIGHT, ACCENT, MUTED = "#1b2a41", "#e8edf3", "#d55e00", "#8a97a8"
SIZES = (1, 16, 64)
# The paper's table 3: milliseconds of a whole step of Qwen3-8B with D = 15, at the four ratios.
PAPER = {
    name.upper(): {size: tuple(rows[str(size)].values()) for size in SIZES}
    for name, rows in published()["table3"]["devices"].items()
}
# Confidences of six requests' drafts, as a drafter gives them: some texts are easy to foresee, some are not.
CONFIDENCE = torch.tensor(
    [
        [0.98, 0.97, 0.99, 0.95, 0.96, 0.92, 0.90],
        [0.90, 0.60, 0.55, 0.40, 0.50, 0.30, 0.20],
        [0.99, 0.98, 0.90, 0.85, 0.60, 0.50, 0.40],
        [0.35, 0.50, 0.40, 0.30, 0.30, 0.20, 0.20],
        [0.95, 0.92, 0.60, 0.80, 0.70, 0.40, 0.30],
        [0.70, 0.85, 0.30, 0.50, 0.40, 0.30, 0.20],
    ]
)


def ranked(confidence: torch.Tensor) -> Scores:
    """Returns the survival of every draft, confidences float32 [B, D], by the package's own stage."""
    rows, depth = confidence.shape
    zero = torch.zeros(rows, dtype=torch.int64)
    batch = Batch(torch.arange(rows), zero, zero, zero + depth, zero, zero)
    return score(Drafts.chain(torch.zeros(rows, depth, dtype=torch.int64), confidence), batch)


def flow() -> None:
    """One step, from the drafter to the requests."""
    stages = [
        ("draft", "a block of tokens\nfor every request"),
        ("score", "chance that each\ndraft survives"),
        ("cut", "the best T of the\nwhole batch"),
        ("pack", "one row,\nno padding"),
        ("verify", "one forward of\nthe target"),
        ("accept", "drafts the target\nagrees with"),
        ("commit", "tokens and K/V\nof each request"),
    ]
    figure, axes = plt.subplots(figsize=(11, 1.9))
    for place, (name, text) in enumerate(stages):
        own = name == "cut"
        box = FancyBboxPatch(
            (place * 1.5, 0), 1.2, 0.9, boxstyle="round,pad=0.05", fc=ACCENT if own else LIGHT, ec=DARK
        )
        axes.add_patch(box)
        colour = "white" if own else DARK
        axes.text(place * 1.5 + 0.6, 0.68, name, ha="center", va="center", weight="bold", color=colour, fontsize=11)
        axes.text(place * 1.5 + 0.6, 0.27, text, ha="center", va="center", color=colour, fontsize=8)
        if place:
            start, end = (place * 1.5 - 0.24, 0.45), (place * 1.5 - 0.06, 0.45)
            axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=10, color=DARK))
    axes.add_patch(
        FancyArrowPatch(
            (9.6, -0.08),
            (0.6, -0.08),
            connectionstyle="arc3,rad=-0.05",
            arrowstyle="-|>",
            mutation_scale=12,
            color=MUTED,
        )
    )
    axes.text(5.1, -0.62, "next step: each request goes on from its last token", ha="center", color=MUTED, fontsize=9)
    axes.set(xlim=(-0.2, 10.4), ylim=(-0.75, 1.05))
    axes.axis("off")
    _save("flow", figure)


def pool() -> None:
    """The same budget given out evenly, and to the best drafts of the whole batch."""
    scores = ranked(CONFIDENCE)
    rows = len(scores.survival)
    best = cut(scores, [0.5])
    even = torch.zeros_like(best.keep)
    even[:, : (best.total - rows) // rows] = True
    figure, both = plt.subplots(1, 2, figsize=(11, 3.4), sharey=True)
    for axes, keep, title in ((both[0], even, "same depth for all"), (both[1], best.keep, "D-cut: one pool")):
        expected = rows + float(scores.survival[keep].sum())
        _grid(axes, scores, keep)
        axes.set_title(f"{title}: {best.total} positions, {expected:.1f} tokens expected", fontsize=11)
        axes.set_xlabel("draft of the block")
    both[0].set_ylabel("request")
    _save("pool", figure)


def _grid(axes: Axes, scores: Scores, keep: torch.Tensor) -> None:
    """Draws survivals as shades, with a frame around what is kept."""
    rows, depth = keep.shape
    axes.imshow(scores.survival, cmap="Blues", vmin=0, vmax=1.8, aspect="auto")
    for row in range(rows):
        for node in range(depth):
            value, kept = float(scores.survival[row, node]), bool(keep[row, node])
            colour = DARK if kept else "#5b6878"
            weight = "bold" if kept else "normal"
            axes.text(node, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=colour, weight=weight)
        width = int(keep[row].sum())
        if width:
            axes.add_patch(Rectangle((-0.48, row - 0.46), width - 0.04, 0.92, fill=False, ec=ACCENT, lw=2.2))
    axes.set(xticks=range(depth), xticklabels=range(1, depth + 1), yticks=range(rows), yticklabels="abcdef")
    axes.tick_params(length=0)


def packed() -> None:
    """Rows of one forward: padded to the longest kept depth, and packed."""
    best: Cut = cut(ranked(CONFIDENCE), [0.5])
    counts = (best.keep.sum(1) + 1).tolist()
    shades = plt.get_cmap("cividis")([0.05, 0.25, 0.45, 0.6, 0.75, 0.95])
    figure, axes = plt.subplots(figsize=(11, 2.9))
    for row, count in enumerate(counts):
        for place in range(max(counts)):
            pad = place >= count
            axes.add_patch(
                Rectangle(
                    (place, 7.5 - row),
                    0.92,
                    0.86,
                    fc="white" if pad else shades[row],
                    ec=MUTED if pad else DARK,
                    ls=":" if pad else "-",
                )
            )
    axes.text(max(counts) + 0.4, 5.4, f"padded: {len(counts) * max(counts)} rows", va="center", color=DARK)
    place = 0
    for row, count in enumerate(counts):
        for _ in range(count):
            axes.add_patch(Rectangle((place, 0.9), 0.92, 0.86, fc=shades[row], ec=DARK))
            place += 1
    axes.text(place + 0.4, 1.3, f"packed: {place} rows", va="center", color=DARK)
    axes.set(xlim=(-0.3, place + 6), ylim=(0.5, 8.6))
    axes.axis("off")
    _save("packed", figure)


def cost() -> None:
    """What a step costs: the paper's table."""
    figure, both = plt.subplots(1, 2, figsize=(11, 3.2), sharey=True)
    styles = {1: ("o", "-"), 16: ("s", "--"), 64: ("^", "-.")}
    for axes, (name, rows) in zip(both, PAPER.items(), strict=True):
        for size, times in rows.items():
            marker, line = styles[size]
            axes.plot([100 * r for r in RATIOS], times, line, marker=marker, color=DARK, label=f"B = {size}")
        axes.set(title=name, xlabel="positions verified, %", xticks=[100 * r for r in RATIOS], ylim=(0, None))
        axes.legend(frameon=False)
    both[0].set_ylabel("one step, ms")
    _save("cost", figure)


def choice() -> None:
    """Expected tokens per second at each budget, and the one that is taken."""
    figure, both = plt.subplots(1, 2, figsize=(11, 3.2))
    pattern = torch.cat([CONFIDENCE, CONFIDENCE[:, :1].expand(-1, 8) * 0.6], dim=1)
    for axes, name in zip(both, PAPER, strict=True):
        for size, marker in zip(SIZES, "os^", strict=True):
            scores = ranked(pattern.repeat(-(-size // 6), 1)[:size])
            costs = _table(PAPER[name][size], size)
            taken = cut(scores, RATIOS, costs)
            rates = [_expected(cut(scores, [r]), scores) / costs(size, positions(r, size, 15)) for r in RATIOS]
            share = [100 * rate / rates[-1] for rate in rates]
            axes.plot([100 * r for r in RATIOS], share, marker=marker, color=DARK, lw=1, label=f"B = {size}")
            axes.plot(100 * taken.budget, share[RATIOS.index(taken.budget)], "o", ms=15, mfc="none", mec=ACCENT, mew=2)
        axes.axhline(100, color=MUTED, lw=0.8, ls=":")
        axes.set(title=name, xlabel="positions verified, %", xticks=[100 * r for r in RATIOS])
        axes.margins(y=0.12)
        axes.legend(frameon=False)
    both[0].set_ylabel("expected tokens/s,\n% of verifying everything")
    _save("choice", figure)


def _expected(taken: Cut, scores: Scores) -> float:
    return len(scores.survival) + float(scores.survival[taken.keep].sum())


def _table(times: tuple[float, ...], size: int) -> Callable[[int, int], float]:
    rows = {positions(r, size, 15): t / 1000 for r, t in zip(RATIOS, times, strict=True)}
    return CostTable.from_rows({size: rows}, draft_tokens=15).drafted


def _save(name: str, figure: plt.Figure) -> None:
    """Writes figures/NAME.svg, the same bytes for the same drawing."""
    FOLDER.mkdir(exist_ok=True)
    figure.tight_layout()
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    style = {"font.family": "DejaVu Sans", "svg.hashsalt": "hf-dcut"}
    plt.rcParams.update({**style, "axes.spines.top": False, "axes.spines.right": False})
    for draw in (flow, pool, packed, cost, choice):
        draw()
