"""The table's seconds as rounds correct them: a machine that changed is seen soon, and an odd round is not."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_chances import table_of

from specbuild.runtime.speculation.live import LiveTimings

TIMES = {
    "verify": [[1, 1.0], [2, 1.2], [64, 13.6]],
    "draft": [[1, 0.1], [64, 0.73]],
    "plain": 0.05,
    "round": 0.1,
    "level": 0.02,
    "sampled": {"plain": 0.1, "round": 0.2, "level": 0.04},
}
TABLE = table_of(TIMES, 2)
SOON = 6  # rounds of a shape within which a change of the machine is noticed


def rounds(live: LiveTimings, count: int, rows: int, slower: float, own: float = 1.0) -> None:
    """So many rounds of one sequence with so many rows, by a machine that is `slower` than the table's."""
    times = live.timings.at(live.lanes or 1)
    for _ in range(count):
        live.step("verify", rows, float(times.verify_rows[rows]) * slower)
        live.round(own * (times.round if rows > 1 else times.plain), 1, rows - 1, False)


def test_a_round_of_plain_decoding_takes_what_it_takes_now() -> None:
    live = LiveTimings(TABLE, 2)
    table = TABLE.at(2)
    assert live.at(2).of_round(2, 2, False) == float(table.verify_rows[2]) + table.plain
    assert live.at(2, 0.8).of_round(2, 1, False) == float(table.verify_rows[2]) + TABLE.at(2, 0.8).plain / 2
    for _ in range(20):
        live.step("verify", 2, 3 * float(table.verify_rows[2]))
        live.round(3 * table.plain, 2, 0, False)
    assert live.at(2).of_round(2, 2, False) == pytest.approx(3 * (float(table.verify_rows[2]) + table.plain), rel=0.05)
    before = live.at(2).of_round(2, 2, False)
    live.step("verify", 2, 9 * float(table.verify_rows[2]))
    assert live.at(2).of_round(2, 2, False) == before, "one slow step is no change"


@pytest.mark.parametrize("slower", [0.3, 1.6, 4.0])
@pytest.mark.parametrize("rows", [1, 8])
def test_a_machine_that_changed_is_seen_within_the_stated_rounds_and_so_is_its_return(slower: float, rows: int) -> None:
    live = LiveTimings(TABLE, 1)
    rounds(live, 50, rows, 1.0)
    for factor in (slower, 1.0):
        rounds(live, SOON, rows, factor)
        assert live.at(1).verify[rows] == pytest.approx(factor * TABLE.at(1).verify[rows], rel=0.15)
        assert live.correction == pytest.approx(factor, rel=0.1)
        rounds(live, 4, 1, factor)


def test_one_shape_that_is_off_says_little_of_the_others() -> None:
    """Steps of 8 rows take twice as long while one core is busy, those of one row as long as before."""
    live = LiveTimings(TABLE, 1)
    for _ in range(20):
        rounds(live, 3, 1, 1.0)
        rounds(live, 3, 8, 2.0)
    now, then = live.at(1), TABLE.at(1)
    assert now.verify[8] / now.verify[1] == pytest.approx(2.0 * then.verify[8] / then.verify[1], rel=0.15)
    assert now.verify[1] == pytest.approx(then.verify[1], rel=0.15)


@pytest.mark.parametrize("rows", [1, 8])
def test_the_first_step_of_a_shape_says_nothing(rows: int) -> None:
    """It binds its buffers: a prompt's cold step would make lookups of as many rows look dear for long."""
    live = LiveTimings(TABLE, 1)
    live.step("verify", rows, 30 * float(TABLE.at(1).verify_rows[rows]))
    assert live.at(1).verify.tolist() == TABLE.at(1).verify.tolist()
    rounds(live, SOON, rows, 2.0)
    assert live.at(1).verify[rows] == pytest.approx(2 * TABLE.at(1).verify[rows], rel=0.15)


def test_each_part_of_a_round_is_corrected_by_itself() -> None:
    """On two lanes: the draft and the loop's own time took twice as long, the target what the table says."""
    live, now = LiveTimings(TABLE, 2), TABLE.at(2)
    for _ in range(40):
        live.step("verify", 2, float(now.verify_rows[2]))
        live.round(now.plain, 2, 0, False)
        live.step("draft", 2, 4 * float(now.draft_rows[2]), 2)
        live.step("verify", 16, float(now.verify_rows[16]))
        live.round(2 * (now.round + 2 * now.level), 2, 14, False, 2)
    found = live.at(2)
    assert found.draft_rows[2] == pytest.approx(2 * now.draft_rows[2], rel=0.1)
    assert found.level == pytest.approx(2 * now.level, rel=0.1)
    assert found.verify_rows[16] == pytest.approx(now.verify_rows[16], rel=0.05)
    assert found.plain == pytest.approx(now.plain, rel=0.05)
    assert live.took > live.said > 0


@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_plain_decoding_is_measured_again_and_drafts_do_not_wait_long_for_it(slower: float) -> None:
    """Where the machine changed, and now and then; a fixed tree is drafted in each round all the same."""
    live, waited = LiveTimings(TABLE, 1), 0
    rounds(live, 5, 1, 1.0)
    rounds(live, 40, 8, 1.0)
    assert not live.plain_due
    for _ in range(1500):
        rounds(live, 1, 8, slower)
        waited += live.plain_due
    assert 0 < waited < 150
    rounds(live, 300, 1, 1.0)
    assert not live.plain_due
    assert live.at(1).verify[8] == pytest.approx(TABLE.at(1).verify[8], rel=0.05), "what was long ago is forgotten"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 200), st.floats(allow_nan=True, allow_infinity=True)), max_size=60))
def test_no_clock_breaks_it(told: list[tuple[int, float]]) -> None:
    live, off = LiveTimings(TABLE, 2), LiveTimings(TABLE, 2, on=False)
    for rows, seconds in told:
        off.step("verify", rows, seconds)
        live.step(random.Random(rows).choice(["verify", "draft"]), rows, seconds)
        live.round(seconds, 2, rows % 3, rows % 2 == 0)
        for temperature in (0.0, 0.8):
            now = live.at(1, temperature)
            assert all(math.isfinite(each) and each > 0 for each in now.verify[1:].tolist())
            assert now.alone > 0
    assert off.at(2).verify.tolist() == TABLE.at(2).verify.tolist()


@given(st.lists(st.tuples(st.sampled_from([1, 2, 8]), st.floats(0.2, 5), st.booleans()), max_size=60))
@settings(deadline=None)
def test_when_a_policy_asks_changes_nothing_that_is_known(told: list[tuple[int, float, bool]]) -> None:
    asked, late = LiveTimings(TABLE, 1), LiveTimings(TABLE, 1)
    for rows, slower, drafts in told:
        for live in (asked, late):
            if drafts:
                live.step("draft", 1, 0.1 * slower, 2)
            rounds(live, 1, rows, slower, own=slower)
        asked.settle()
    late.settle()
    now, then = asked.at(1), late.at(1)
    assert (asked.said, asked.took, asked.correction) == (late.said, late.took, late.correction)
    assert (now.verify.tolist(), now.plain, now.level) == (then.verify.tolist(), then.plain, then.level)
    assert asked.plain_due == late.plain_due
