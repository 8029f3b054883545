from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from hf_dcut.app import plots
from hf_dcut.app.curve import Curve
from hf_dcut.app.trace import Answer, Draft, Piece, Row, Step, Trace

CURVE = Curve(2, (2, 3, 4), (2.0, 2.9, 3.4), (0.1, 0.12, 0.2), 0.09, ((0.5, 3), (0.75, 4), (1.0, 4)), 3)


def drafts(kept: int, accepted: int, depth: int = 4) -> tuple[Draft, ...]:
    return tuple(Draft(1, "t", k - 1, 0.9, 0.9 ** (k + 1), k < kept, k < accepted) for k in range(depth))


def trace(requests: int = 2, steps: int = 3, depth: int = 4) -> Trace:
    answers = [Answer("p", [Piece(1, "x", False)] * (steps + 1)) for _ in range(requests)]
    made = Trace("D-cut", depth, 16, answers, seconds=1.0)
    for _ in range(steps):
        rows = tuple(Row(r, drafts(3, 1, depth), "x", False) for r in range(requests))
        made.steps.append(Step(rows, 0.5, 4 * requests, 5 * requests, 0.2, 2 * requests, CURVE))
    return made


def areas(svg: str) -> dict[str, float]:
    """Returns the area of all rectangles of each class of path."""
    found: dict[str, float] = {}
    for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}path"):
        sizes = re.findall(r"v-([\d.]+)h([\d.]+)v", element.get("d", ""))
        if sizes:
            kind = element.get("class", "")
            found[kind] = found.get(kind, 0) + sum(float(h) * float(w) for h, w in sizes)
    return found


def test_areas_of_the_map_are_the_numbers_of_tokens() -> None:
    found = areas(plots.heat_map(trace()))
    token = found["accepted"] / (2 * 3 * 1)
    kept = sum(area for kind, area in found.items() if kind.startswith("kept"))
    assert kept == pytest.approx(2 * 3 * 2 * token, rel=0.02)
    assert found["cut"] == pytest.approx(2 * 3 * 1 * token, rel=0.02)


def test_more_kept_is_darker() -> None:
    made = trace()
    shallow = [Row(r, drafts(1, 0), "x", False) for r in range(2)]
    made.steps = [Step(tuple(shallow), 0.5, 4, 10, 0.1, 2, None)]
    assert "kept0" in plots.heat_map(made)
    deep = [Row(r, drafts(4, 0), "x", False) for r in range(2)]
    made.steps = [Step(tuple(deep), 0.5, 10, 10, 0.1, 2, None)]
    assert "kept3" in plots.heat_map(made)


@pytest.mark.parametrize("requests", [2, 8, 9, 16, 17, 32])
@pytest.mark.parametrize("steps", [0, 1, 15])
def test_map_of_any_size_is_xml_and_says_what_it_shows(requests: int, steps: int) -> None:
    root = ET.fromstring(plots.heat_map(trace(requests, steps)))
    assert root.get("role") == "img"
    assert root.get("aria-label", "").startswith("Heat map of")


def test_map_of_a_large_run_stays_small() -> None:
    assert len(plots.heat_map(trace(32, 256))) < 800_000, "a picture of the largest run, sent about twice a second"


def test_saved_steps_are_told_at_the_end() -> None:
    made = trace(steps=3)
    assert "fewer than plain" not in plots.heat_map(made)
    for answer in made.answers:
        answer.pieces += [Piece(1, "y", True)] * 5
        answer.finish_reason = "length"
    assert "5 steps fewer than plain decoding" in plots.heat_map(made)


def test_plain_runs_have_a_map_without_a_strip() -> None:
    made = trace(depth=0)
    made.steps = [Step((Row(0, (), "x", False), Row(1, (), "x", False)), None, 2, 2, 0.1, 2, None)]
    content = plots.heat_map(made)
    assert set(areas(content)) == {"own"}
    assert "share of positions" not in content


def test_curve_tells_the_choice() -> None:
    root = ET.fromstring(plots.cost_curve(trace()))
    assert "Chosen: 3 positions, 80%, 24 tokens a second" in root.get("aria-label", "")
    words = " ".join(element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text"))
    assert "chosen: 50%" in words
    assert "75%" in words
    assert "100%" not in words, "as many positions as 75 %, which comes first"


def test_no_curve_says_why() -> None:
    made = trace(steps=1)
    assert "appears with the first drafted step" in plots.cost_curve(trace(steps=0))
    made.steps[0] = Step(made.steps[0].rows, 0.5, 8, 10, 0.2, 4, None)
    assert "fixed budget" in plots.cost_curve(made)
    made.steps[0] = Step(made.steps[0].rows, None, 2, 10, 0.2, 2, None)
    assert "This step was plain" in plots.cost_curve(made)


def test_ranking_puts_the_best_first_and_the_knife_behind_the_kept() -> None:
    content = plots.ranking(trace().steps[0])
    assert "verified 6, cut 2" in content
    assert set(areas(content)) == {"accepted", "kept2", "cut"}
    assert plots.ranking(Step((), None, 0, 0, 0.1, 0, None)) == ""


def test_race_has_a_line_for_each_method() -> None:
    root = ET.fromstring(plots.race([trace(), trace(steps=5), trace(steps=0)]))
    lines = [e for e in root.iter("{http://www.w3.org/2000/svg}path") if "racer" in e.get("class", "")]
    assert len(lines) == 2
    assert "Tokens over time" in root.get("aria-label", "")


def test_sheet_is_one_file_with_its_style() -> None:
    root = ET.fromstring(plots.sheet([plots.heat_map(trace()), plots.cost_curve(trace())]))
    inner = [e for e in root if e.tag.endswith("svg")]
    assert len(inner) == 2
    assert float(inner[1].get("y", "0")) > float(inner[0].get("height", "0"))
    assert any(".dcut" in (e.text or "") for e in root if e.tag.endswith("style"))


def test_of_many_budgets_the_quarters_are_named() -> None:
    made = trace()
    shares = [k / 16 for k in range(1, 17)]
    totals = tuple(range(2, 34))
    curve = Curve(2, totals, (2.0,) * 32, (0.1,) * 32, 0.09, tuple((s, round(32 * s) + 1) for s in shares), 9)
    made.steps = [replace(step, curve=curve) for step in made.steps]
    drawn = plots.cost_curve(made)
    assert [f"{share:.0%}</text>" in drawn for share in shares] == [share * 4 % 1 == 0 for share in shares]
    assert drawn.count('class="candidate"') == 16
