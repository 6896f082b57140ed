"""The table's seconds as steps correct them: a machine that changed is seen soon, and an odd step is not."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_chances import table_of

from specbuild.runtime.speculation.cost_model import CostModel

TIMES = {
    "verify": [[1, 1.0], [2, 1.2], [64, 13.6]],
    "draft": [[1, 0.1], [64, 0.73]],
    "plain": 0.05,
    "round": 0.1,
    "level": 0.02,
    "sampled": {"plain": 0.1, "round": 0.2, "level": 0.04},
}
TABLE = table_of(TIMES, 2)


def steps(cost, count, rows, slower):
    """So many steps of so many rows, on a machine that is `slower` than the table's."""
    for _ in range(count):
        cost.record("verify", rows, float(cost.times().verify[rows]) * slower)


def test_a_round_costs_its_step_and_the_loop_around_it():
    cost, times = CostModel(TABLE, 2), TABLE.at(2)
    assert cost.of_round(2).plain == float(times.verify[2]) + times.plain
    assert cost.of_round(1, sampled=True).plain == float(times.verify[1]) + TABLE.at(2, True).plain / 2
    assert cost.of_round(2).verify(6) == float(times.verify[8]) + times.round
    assert CostModel(TABLE, 2, padded=True).of_round(1).verify(3, 3) == float(times.verify[8]) + times.round / 2
    drafting = 3 * (float(times.draft[2]) + times.level)
    assert cost.of_round(2).draft(3, [0, 0]) == pytest.approx(drafting)
    assert cost.of_round(2).draft(3, [500, 0]) > drafting, "a text that the model has not run is read first"


@pytest.mark.parametrize("slower", [0.3, 1.6, 3.9])
@pytest.mark.parametrize("rows", [1, 8])
def test_a_machine_that_changed_is_seen_and_so_is_its_return(slower, rows):
    cost = CostModel(TABLE, 1)
    steps(cost, 50, rows, 1.0)
    for factor in (slower, 1.0):
        steps(cost, 32, rows, factor)
        assert cost.factor("verify", rows) == pytest.approx(factor, rel=0.1)
        assert cost.correction == pytest.approx(factor, rel=0.1)


def test_one_shape_that_is_off_says_nothing_of_another():
    """Steps of 8 rows take twice as long while one core is busy, those of one row as long as before."""
    cost = CostModel(TABLE, 1)
    for _ in range(20):
        steps(cost, 3, 1, 1.0)
        steps(cost, 3, 8, 2.0)
    assert cost.factor("verify", 8) == pytest.approx(2.0, rel=0.1)
    assert cost.factor("verify", 1) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("rows", [1, 8])
def test_the_first_step_of_a_shape_says_nothing(rows):
    """It binds its buffers: a prompt's cold step would make lookups of as many rows look dear for long."""
    cost = CostModel(TABLE, 1)
    steps(cost, 1, rows, 30.0)
    assert (cost.factor("verify", rows), cost.correction) == (1.0, 1.0)


def test_a_shape_that_was_not_seen_for_long_is_tried_again():
    cost = CostModel(TABLE, 1)
    steps(cost, 20, 8, 3.0)
    steps(cost, 1000, 1, 1.0)
    assert cost.factor("verify", 8) == pytest.approx(1.0, rel=0.05)


def test_what_is_faster_than_its_table_is_so_in_shapes_that_were_not_seen():
    cost = CostModel(TABLE, 1)
    steps(cost, 50, 1, 0.5)
    assert cost.factor("verify", 8) == pytest.approx(0.5, rel=0.05)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 200), st.floats(allow_nan=True, allow_infinity=True)), max_size=60))
def test_no_clock_breaks_it(told):
    cost, fixed = CostModel(TABLE, 2), CostModel(TABLE, 2, corrected=False)
    for rows, seconds in told:
        fixed.record("verify", rows, seconds)
        cost.record("verify" if rows % 2 else "draft", rows, seconds)
        prices = cost.of_round(2)
        assert all(math.isfinite(each) and each > 0 for each in (prices.plain, prices.verify(9), prices.draft(2, [0])))
    assert fixed.factor("verify", 3) == fixed.correction == 1.0
