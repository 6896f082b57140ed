"""The timing table: what is between and beyond what was measured, and what is refused."""

import copy
import math
import platform
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.runtime.backends.cpu.machine import machine, processor
from specbuild.runtime.errors import BundleError
from specbuild.runtime.speculation.timing_table import TimingTable

CHANCES = {"likely": [-2.0, -1.0, 0.0], "chance": [0.1, 0.5, 0.9], "step": 0.7, "reach": [0, 1], "lookup": [0.0, 0.5]}
TIMES = {"verify": [[1, 2.0], [3, 4.0], [4, 3.5]], "draft": [], "plain": 0.1, "round": 0.2, "level": 0.3}
RECORD = {
    "schema": 2,
    "machine": {"processor": "abacus"},
    "widest": "best:8",
    "times": {"4": TIMES, "1": TIMES | {"plain": 0.5}},
    "chances": {"greedy": CHANCES, "sampled": CHANCES | {"step": 0.6}},
}


def test_times_between_and_beyond_the_measured_ones():
    times = TimingTable.of(RECORD, 6).at(1)
    assert times.verify.tolist() == pytest.approx([0, 2, 3, 4, 4, 4 + 2 / 3, 4 + 4 / 3])  # it never falls
    assert times.draft.tolist() == [0]
    assert times.alone == 2.5


def test_a_batch_has_the_times_of_the_next_size_that_was_measured():
    timings = TimingTable.of(RECORD, 6)
    assert [timings.at(batch).plain for batch in (1, 2, 4, 9)] == [0.5, 0.1, 0.1, 0.1]
    assert [timings.chances[sampled].step for sampled in (False, True)] == [0.7, 0.6]


def test_chances_by_likelihood():
    found = TimingTable.of(RECORD, 6).chances[False].log_chances(np.array([-np.inf, -9.0, -1.5, 0.0]))
    assert found[0] == -np.inf
    assert np.exp(found[1:]) == pytest.approx([0.1, 0.3, 0.9])


NO_NUMBERS = st.sampled_from([None, "x", -1.0, math.nan, math.inf, [], {}, [1.0, "x"], True])
WRONG = st.one_of(
    st.tuples(st.just(["schema"]), st.sampled_from([1, 3, "2", None])),
    st.tuples(st.sampled_from([["times"], ["chances"], ["chances", "greedy"], ["widest"]]), NO_NUMBERS),
    st.tuples(st.sampled_from([["times", "1", each] for each in ("plain", "round", "level")]), NO_NUMBERS),
    st.tuples(
        st.just(["times", "1", "verify"]),
        st.sampled_from([[], [[2, 1.0]], [[1, -1.0]], [[1, math.nan]], [[1, 1.0], [1, 2.0]], [[3, 1.0], [1, 1.0]]]),
    ),
    st.tuples(st.just(["times", "x"]), st.just(TIMES)),
    st.tuples(st.just(["chances", "greedy", "likely"]), st.sampled_from([[0.0], [], None])),
    st.tuples(st.just(["chances", "greedy", "chance"]), st.sampled_from([[0.1, 0.5, 1.5], [0.1], None])),
).filter(lambda wrong: not (wrong[0] == ["widest"] and wrong[1] == "x"))


@given(WRONG)
def test_what_is_no_timing_table_is_refused_in_one_line(wrong):
    record = copy.deepcopy(RECORD)
    place = record
    for name in wrong[0][:-1]:
        place = place[name]
    place[wrong[0][-1]] = wrong[1]
    with pytest.raises(BundleError, match="tune"):
        TimingTable.of(record, 6)


def test_a_machine_is_its_processor_its_threads_and_what_computes():
    assert machine(2) == machine(2) != machine(3)
    assert machine(2)["processor"]


@pytest.mark.parametrize("named", ["abacus", ""])
def test_where_the_system_lists_no_processor_python_names_it(named, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda _: False)
    monkeypatch.setattr(platform, "processor", lambda: named)
    assert processor() == (named or platform.machine())


def test_a_step_of_fewer_rows_than_sequences_takes_what_it_does_for_fewer_of_them():
    one, four = (
        {
            "verify": [[1, took], [8, 8 * took]],
            "draft": [[1, took / 10], [8, 0.8 * took]],
            "plain": 1,
            "round": 1,
            "level": 0,
        }
        for took in (10.0, 24.0)
    )
    times = TimingTable.of(RECORD | {"times": {"1": one, "4": four}}, 8).at(4)
    assert times.verify[:5].tolist() == [0.0, 10.0, 20.0, 24.0, 24.0]
    assert times.draft[1:5].tolist() == [1.0, 2.0, 2.4, 2.4]
