"""What the plots are made of: axes, lines, labels, and an SVG around them that says in words what it shows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from importlib.resources import files


def svg(width: float, height: float, body: str, text: str, name: str) -> str:
    """Returns an SVG image.

    Args:
        width, height: of its coordinates; it scales to its place.
        body: its elements.
        text: what it shows, for those who do not see it.
        name: its class.
    """
    return (
        f'<svg class="plot {name}" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(text)}" '
        f'xmlns="http://www.w3.org/2000/svg">{body}</svg>'
    )


def empty(width: float, height: float, words: str) -> str:
    """Returns a plot that only says why it is empty."""
    return svg(width, height, label(width / 2, height / 2, words, "middle"), words, "void")


def label(x: float, y: float, words: str, anchor: str, kind: str = "label") -> str:
    """Returns a text element; anchor is "start", "middle" or "end"."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


@dataclass(frozen=True)
class Frame:
    """A rectangle with axes.

    Attributes:
        left, top, width, height: its place in the image.
        x_range, y_range: what the sides stand for.
    """

    left: float
    top: float
    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    @property
    def bottom(self) -> float:
        """Where y's least value is drawn."""
        return self.top + self.height

    def x(self, value: float) -> float:
        """Returns where a value stands, from the left."""
        low, high = self.x_range
        return self.left + (value - low) / (high - low or 1) * self.width

    def y(self, value: float) -> float:
        """Returns where a value stands, from above."""
        low, high = self.y_range
        return self.bottom - (value - low) / (high - low or 1) * self.height

    def line(self, points: Iterable[tuple[float, float]], kind: str) -> str:
        """Returns a line through the points."""
        path = "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)
        return f'<path class="line {kind}" d="M{path}"/>'

    def dot(self, x: float, y: float, radius: float, kind: str) -> str:
        """Returns a dot."""
        return f'<circle class="{kind}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="{radius:g}"/>'

    def level(self, y: float, kind: str, words: str) -> str:
        """Returns a horizontal line with its name at the right end."""
        at = self.y(y)
        line = f'<path class="line {kind}" d="M{self.left} {at:.1f}h{self.width}"/>'
        return line + label(self.left + self.width, at - 5, words, "end")

    def grid(self, lines: int, words: str = "{:g}") -> str:
        """Returns about so many horizontal lines at round values, with these values at their left."""
        step = _round_step((self.y_range[1] - self.y_range[0]) / lines)
        count = int((self.y_range[1] - self.y_range[0]) / step + 1e-9)
        values = [self.y_range[0] + i * step for i in range(count + 1)]
        rules = "".join(f'<path class="grid" d="M{self.left} {self.y(v):.1f}h{self.width}"/>' for v in values)
        return rules + "".join(label(self.left - 6, self.y(v) + 4, words.format(v), "end") for v in values)

    def x_axis(self, words: str, least: float = 0) -> str:
        """Returns the values under the frame, at least so far apart, and what they are."""
        low, high = self.x_range
        step = _round_step(max(least, (high - low) / 6))
        first = -(-low // step) * step
        values = [first + i * step for i in range(int((high - first) / step + 1e-9) + 1)]
        ticks = "".join(label(self.x(v), self.bottom + 14, f"{v:g}", "middle") for v in values)
        return ticks + label(self.left + self.width / 2, self.bottom + 31, words, "middle")


def stacked(plots: Iterable[str]) -> str:
    """Returns plots under each other in one SVG file with its style inside."""
    style = files("hf_dcut.app").joinpath("plots.css").read_text()
    inner, top, widest = [], 20.0, 0.0
    for plot in plots:
        size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', plot)
        assert size is not None
        wide, high = map(float, size.groups())
        inner.append(plot.replace("<svg ", f'<svg x="20" y="{top:g}" width="{wide:g}" height="{high:g}" ', 1))
        top, widest = top + high + 20, max(widest, wide)
    width = widest + 40
    return (
        f'<svg class="dcut" xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{top:g}" '
        f'viewBox="0 0 {width:g} {top:g}">'
        f'<style>{style}</style><rect class="paper" width="100%" height="100%"/>{"".join(inner)}</svg>'
    )


def _round_step(rough: float) -> float:
    """Returns 1, 2 or 5 times a power of ten, at least `rough`."""
    power = 10.0 ** int(f"{rough:e}".partition("e")[2])
    return next(n * power for n in (1, 2, 5, 10) if n * power >= rough * (1 - 1e-9))
