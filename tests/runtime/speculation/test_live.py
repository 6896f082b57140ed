"""The table's seconds as rounds correct them: a machine that changed is seen soon, and an odd round is not."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.speculation.live import (
    FRESH,
    LATER,
    PLAIN_AGE,
    PLAIN_ROUNDS,
    WAITED,
    LiveTimings,
    shape_of,
)
from specbuild.runtime.speculation.timings import TimingTable

LEFT_WITHIN = 6  # rounds of a shape within which a change of the machine is noticed
TIMES = {
    "verify": [[1, 1.0], [2, 1.2], [64, 13.6]],
    "draft": [[1, 0.1], [64, 0.73]],
    "plain": 0.05,
    "round": 0.1,
    "level": 0.02,
    "sampled": {"plain": 0.1, "round": 0.2, "level": 0.04},
}
CHANCES = {"likely": [0.0], "chance": [0.5], "step": 0.5, "reach": [0, 0.5], "lookup": [0.0, 0.5]}
TABLE = TimingTable.of(
    {
        "schema": 2,
        "machine": {},
        "widest": "best:8",
        "times": {"1": TIMES, "2": TIMES},
        "chances": {"greedy": CHANCES, "sampled": CHANCES},
    },
    64,
)


def rounds(live: LiveTimings, count: int, rows: int, slower: float, own: float = 1.0) -> None:
    """So many rounds of one sequence with so many rows, by a machine that is `slower` than the table's."""
    times = live.timings.at(live.lanes or 1)
    for _ in range(count):
        live.step("verify", rows, float(times.verify_rows[rows]) * slower)
        live.round(own * (times.round if rows > 1 else times.plain), 1, rows - 1, False)


def test_nothing_is_corrected_where_nothing_was_told_or_it_is_off() -> None:
    for live in (LiveTimings(TABLE, 1), LiveTimings(TABLE, 1, on=False)):
        if not live.on:
            rounds(live, 99, 8, 3.0)
            live.step("draft", 1, 9.0)
            assert (live.said, live.took) == (0.0, 0.0)
        now, then = live.at(1), TABLE.at(1)
        assert now.verify.tolist() == then.verify.tolist()
        assert (now.plain, now.round, now.level, live.correction) == (then.plain, then.round, then.level, 1.0)
        assert not live.plain_due


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
        rounds(live, LEFT_WITHIN, rows, factor)
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


def test_a_round_that_took_long_by_chance_changes_nothing() -> None:
    live = LiveTimings(TABLE, 1)
    rounds(live, 20, 4, 1.0)
    for _ in range(10):
        rounds(live, 1, 4, 30.0)
        rounds(live, 4, 4, 1.0)
    assert live.at(1).verify[4] == pytest.approx(TABLE.at(1).verify[4], rel=0.05)


@pytest.mark.parametrize("rows", [1, 8])
def test_the_first_step_of_a_shape_says_nothing(rows: int) -> None:
    """It binds its buffers: a prompt's cold step would make lookups of as many rows look dear for long."""
    live = LiveTimings(TABLE, 1)
    live.step("verify", rows, 30 * float(TABLE.at(1).verify_rows[rows]))
    assert live.at(1).verify.tolist() == TABLE.at(1).verify.tolist()
    rounds(live, LEFT_WITHIN, rows, 2.0)
    assert live.at(1).verify[rows] == pytest.approx(2 * TABLE.at(1).verify[rows], rel=0.15)


def test_plain_decoding_of_few_rows_says_nothing_of_the_table_of_many() -> None:
    """Sequences end, and the table may be off by another factor for each number of rows; a slower machine is seen."""
    live, table = LiveTimings(TABLE, 2), TABLE.at(2)
    off = {1: 1.6, 2: 0.6, 4: 0.8}

    def decode(slower: float, *rows: int) -> None:
        for count in rows:
            live.step("verify", count, off[count] * slower * float(table.verify_rows[count]))
            live.round(slower * table.plain, min(count, 2), max(count - 2, 0), False)

    decode(1.0, *[1, 2, 2, 4] * 10)
    for last in (1, 2, 4):
        decode(1.0, last, last)
        for rows, factor in off.items():
            assert live.at(2).verify_rows[rows] == pytest.approx(factor * float(table.verify_rows[rows]), rel=0.05)
    decode(3.0, *[1, 2] * 6)
    for rows in (1, 2):
        assert live.at(2).verify_rows[rows] == pytest.approx(3 * off[rows] * float(table.verify_rows[rows]), rel=0.12)


def test_a_kind_of_round_that_was_not_seen_is_off_as_plain_rounds_are() -> None:
    """Not as the target's steps are, which another part of the machine takes."""
    live, table = LiveTimings(TABLE, 1), TABLE.at(1)
    rounds(live, 20, 1, 0.5, own=3.0)
    assert live.at(1).plain == pytest.approx(3 * table.plain, rel=0.1)
    assert live.at(1).round == pytest.approx(3 * table.round, rel=0.1)


def test_what_was_long_ago_is_forgotten() -> None:
    live = LiveTimings(TABLE, 1)
    rounds(live, 20, 1, 1.0)
    rounds(live, 20, 8, 3.0)
    rounds(live, FRESH + 8, 1, 1.0)
    rounds(live, FRESH, 1, 1.0)
    assert live.at(1).verify[8] == pytest.approx(TABLE.at(1).verify[8], rel=0.05)


def test_own_time_is_counted_by_the_kind_of_round_and_the_draft_by_itself() -> None:
    live = LiveTimings(TABLE, 1)
    for _ in range(12):
        rounds(live, 1, 1, 1.0, own=4.0)
        rounds(live, 1, 8, 1.0, own=1.0)
        live.step("draft", 1, 0.2)
        live.step("draft", 2, 0.22)
        live.step("verify", 8, 2.4)
        live.round((0.1 + 2 * 0.02) * 2, 1, 7, False)
    now, then = live.at(1), TABLE.at(1)
    assert now.plain > 1.5 * now.round
    assert now.level == pytest.approx(2 * then.level, rel=0.3)
    assert now.draft[1] == pytest.approx(2 * then.draft[1], rel=0.2)
    assert now.verify[8] == pytest.approx(then.verify[8], rel=0.1)
    assert live.took > live.said > 0


@pytest.mark.parametrize("grown", [1, 3])
def test_levels_are_expected_of_those_that_grow_a_tree(grown: int) -> None:
    """Of three sequences beside each other; on a machine that takes what the table says nothing is corrected."""
    live = LiveTimings(TABLE, 4)
    times = TABLE.at(4)
    for _ in range(12):
        rounds(live, 3, 3, 1.0)
        live.step("draft", grown, 2 * float(times.draft_rows[grown]), 2)
        live.step("verify", 9, float(times.verify_rows[9]))
        live.round((3 * times.round + 2 * grown * times.level) / 4, 3, 6, False, grown)
    assert live.at(4).level == pytest.approx(times.level, rel=0.02)


def test_rows_are_those_of_all_lanes() -> None:
    """A table by rows of each of two lanes, a step by rows of both."""
    live = LiveTimings(TABLE, 2)
    assert TABLE.at(2).verify_rows[3] == pytest.approx(np.interp(1.5, [1, 2], [1.0, 1.2]))
    for _ in range(12):
        live.step("verify", 16, 2 * float(TABLE.at(2).verify_rows[16]))
        live.round(0.1, 2, 14, False)
    assert live.at(1).verify[8] == pytest.approx(2 * TABLE.at(2).verify[8], rel=0.1)


def test_plain_decoding_is_measured_again_where_the_machine_changed_and_now_and_then() -> None:
    live = LiveTimings(TABLE, 1)
    rounds(live, 5, 1, 1.0)
    rounds(live, 40, 8, 1.0)
    assert not live.plain_due
    rounds(live, LEFT_WITHIN + 5, 8, 2.0)
    assert live.plain_due
    rounds(live, 3, 1, 1.2)
    assert not live.plain_due
    rounds(live, PLAIN_AGE + 2, 8, 2.0)
    assert live.plain_due


@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_policies_do_not_wait_long_for_plain_decoding_where_others_draft_all_the_same(slower: float) -> None:
    """A fixed tree is drafted in each round: neither age nor a machine that changed may end all other drafts."""
    live = LiveTimings(TABLE, 1)
    rounds(live, 5, 1, 1.0)
    rounds(live, 40, 8, 1.0)
    waited = 0
    for _ in range(3 * PLAIN_AGE):
        rounds(live, 1, 8, slower)
        waited += live.plain_due
    assert 0 < waited <= 4 * PLAIN_ROUNDS / WAITED
    assert not live.plain_due


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 200), st.floats(allow_nan=True, allow_infinity=True)), max_size=60))
def test_no_clock_breaks_it(told: list[tuple[int, float]]) -> None:
    live = LiveTimings(TABLE, 2)
    for rows, seconds in told:
        live.step(random.Random(rows).choice(["verify", "draft"]), rows, seconds)
        live.round(seconds, 2, rows % 3, rows % 2 == 0)
        for temperature in (0.0, 0.8):
            now = live.at(1, temperature)
            assert all(math.isfinite(each) and each > 0 for each in now.verify[1:].tolist())
            assert now.alone > 0


def test_reports_wait_until_a_policy_asks_or_many_do() -> None:
    live, times = LiveTimings(TABLE, 1), TABLE.at(1)
    each = 2 * (float(times.verify_rows[1]) + times.plain)
    rounds(live, 3, 1, 2.0, own=2.0)
    assert (live.took, live.said) == (0.0, 0.0)
    live.at(1)
    assert (live.took, live.said) == pytest.approx((3 * each, 3 * each / 2))
    rounds(live, LATER // 2 - 1, 1, 2.0, own=2.0)
    assert live.took == pytest.approx(3 * each)
    rounds(live, 1, 1, 2.0, own=2.0)
    assert live.took == pytest.approx((3 + LATER // 2) * each)


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


def test_a_shape_is_half_an_octave() -> None:
    assert [shape_of(rows) for rows in (0, 1, 2, 3, 4, 6, 8, 64)] == [0, 0, 2, 3, 4, 5, 6, 12]
