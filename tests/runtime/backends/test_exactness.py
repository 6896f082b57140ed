"""The candidates for an exactness class, and what a step lacks of one."""

from __future__ import annotations

from specbuild.runtime.backends.exactness import CANDIDATES, MOST_ROWS, ExactnessClass


def test_what_a_step_lacks() -> None:
    assert [ExactnessClass(1, 2).missing(rows) for rows in (0, 1, 5)] == [0, 0, 0]
    assert [ExactnessClass(4, 4).missing(rows) for rows in (0, 1, 4, 6)] == [0, 3, 0, 2]


def test_the_cheapest_comes_first_and_the_last_has_most_rows() -> None:
    costs = [each.rows * each.sequence_rows for each in CANDIDATES]
    assert costs == sorted(costs)
    assert CANDIDATES[0] == ExactnessClass(1, 1)
    assert max(each.rows for each in CANDIDATES) == MOST_ROWS
