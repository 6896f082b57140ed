"""The candidates for an exactness class, and what a step lacks of one."""

from __future__ import annotations

from specbuild.runtime.backends.exactness import CANDIDATES, MAX_ROWS, ExactnessClass


def test_the_cheapest_comes_first_and_the_last_has_most_rows() -> None:
    costs = [each.rows * each.sequence_rows for each in CANDIDATES]
    assert costs == sorted(costs)
    assert CANDIDATES[0] == ExactnessClass(1, 1)
    assert max(each.rows for each in CANDIDATES) == MAX_ROWS
