"""Trust follows what comes true, and ends where failures in a row are unlikely."""

from __future__ import annotations

import pytest

from specbuild.runtime.speculation.trust import CAUTION, Trust


def test_trust_is_what_came_true_of_what_was_expected() -> None:
    trust = Trust()
    assert trust.ratio == CAUTION
    for _ in range(200):
        trust.record(1, [0.8, 0.7, 0.5])
    assert trust.ratio == pytest.approx(0.5, abs=1e-3)
    trust.record(0, [])
    assert trust.ratio == pytest.approx(0.5, abs=1e-3)


def test_failures_in_a_row_that_are_unlikely_end_all_trust() -> None:
    """Four that had one chance in ten each; where success was never likely it takes longer."""
    found = []
    for chance in (0.9, 0.3):
        trust, rounds = Trust(20.0, 20.0), 0
        while trust.ratio > 0.3:
            trust.record(0, [chance])
            rounds += 1
        found.append(rounds)
    assert found[0] <= 4
    assert found[1] > 10
