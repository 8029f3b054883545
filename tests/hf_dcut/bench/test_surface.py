"""Step seconds between and beyond what was measured."""

from __future__ import annotations

import math

import pytest

from hf_dcut.bench.surface import Surface, published, surface_of


def test_interpolates_in_both_directions_and_goes_on_beyond() -> None:
    surface = Surface({2: {0: 1.0, 4: 2.0, 8: 4.0}, 4: {0: 2.0, 8: 4.0, 16: 8.0}}, draft_tokens=3)
    assert surface.drafted(2, 4) == 2.0
    assert surface.drafted(2, 6) == 3.0
    assert surface.drafted(2, 2) == 1.0  # below the shallowest measured depth
    assert surface.drafted(3, 9) == pytest.approx(4.5)  # three positions a request: 3 at B = 2, 6 at B = 4
    assert surface.drafted(8, 32) == pytest.approx(16.0)
    assert [surface.plain(b) for b in (1, 2, 3, 8)] == [0.5, 1.0, 1.5, 4.0]


def test_scattered_points_give_no_absurd_seconds() -> None:
    surface = Surface({1: {0: 3.0, 2: 4.0, 4: 3.0}, 2: {0: 2.0, 4: 1.0, 8: 0.5}}, draft_tokens=3)
    assert surface.plain(64) == 2.0
    assert surface.drafted(64, 256) == 0.5
    steep = Surface({4: {0: 1.0, 8: 1.0, 16: 9.0}, 8: {0: 9.0, 16: 9.0, 32: 17.0}}, draft_tokens=3)
    assert steep.plain(1) == 0.5
    assert steep.drafted(4, 4) == 0.5


def test_the_papers_tables() -> None:
    h20, h800 = surface_of("h20"), surface_of("h800")
    assert h20.draft_tokens == 15
    assert h20.drafted(64, 1024) == pytest.approx(0.133914)
    assert h800.drafted(1, 4) == pytest.approx(0.007995)
    assert h20.plain(8) == math.inf
    # B = 256 lies on the line through 32 and 64.
    assert h20.drafted(256, 4096) == pytest.approx(0.133914 + 6 * (0.133914 - 0.070066))
    fast = surface_of("h20:4x")
    assert fast.drafted(1, 8) == pytest.approx(0.007157)
    assert fast.drafted(64, 1024) == pytest.approx(0.007157 + (0.133914 - 0.007157) / 4)


def test_published_numbers() -> None:
    paper = published()
    assert len(paper["table1"]["rows"]) == 30
    (row,) = [r for r in paper["table1"]["rows"] if (r["model"], r["method"]) == ("Qwen3 8B", "D-cut (16)")]
    assert row["mean_accepted"]["gsm8k"] == 5.68
    assert row["speedup"]["average"] == 1.21
    assert paper["table2"]["devices"]["h800"]["auto"]["mt-bench"]["64"] == 6894


@pytest.mark.parametrize("name", ["a100", "measured", "h20:fast", "h20:0x", "h20:2"])
def test_unknown_costs_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"costs '{name}': give"):
        surface_of(name)


@pytest.mark.parametrize("rows", [{}, {1: {0: 1.0}}])
def test_rows_need_drafted_steps(rows: dict[int, dict[int, float]]) -> None:
    with pytest.raises(ValueError, match="give drafted steps of at least one batch size"):
        Surface(rows, 3)


def test_a_row_takes_what_one_more_does_where_there_are_many() -> None:
    rows = {2: {0: 1.0, 2: 1.0, 8: 9.0}, 4: {0: 1.0, 4: 2.0, 6: 2.5, 10: 3.0, 16: 4.5}}
    assert Surface(rows, 3).row_seconds == pytest.approx((4.5 - 3.0) / (16 - 10))
    assert Surface({1: {1: 1.0}}, 3).row_seconds == 0.0
