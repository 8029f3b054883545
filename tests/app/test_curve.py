from __future__ import annotations

import pytest

from hf_dcut.app.curve import curve_of
from hf_dcut.cost_table import CostTable

COSTS = CostTable.from_rows({2: {0: 1.0, 2: 1.1, 3: 1.5, 6: 3.0}}, draft_tokens=2)


def test_curve_is_expected_tokens_over_seconds() -> None:
    curve = curve_of([0.9, 0.5, 0.2, 0.1], 2, 2, (0.5, 1.0), 3, COSTS)
    assert curve.totals == (2, 3, 4, 5, 6)
    assert curve.tokens == pytest.approx((2.0, 2.9, 3.4, 3.6, 3.7))
    assert curve.seconds == pytest.approx((1.1, 1.5, 2.0, 2.5, 3.0))
    assert curve.rates[1] == pytest.approx(2.9 / 1.5)
    assert curve.plain_rate == pytest.approx(2.0)
    assert curve.candidates == ((0.5, 3), (1.0, 6))


def test_budgets_beyond_the_drafts_stand_at_their_end() -> None:
    curve = curve_of([0.9], 2, 2, (0.5, 1.0), 3, COSTS)
    assert curve.candidates == ((0.5, 3), (1.0, 3))
    assert curve.at(6) == 1
    assert curve.at(1) == 0
