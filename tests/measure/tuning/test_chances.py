"""Chances are counted of drafts and of texts: by likelihood, and by how much of a text matched."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.measure.tuning.chances import Record, begun, lookup_chances, note
from specbuild.runtime.speculation.timing_table import Chances
from specbuild.runtime.speculation.tree import Tree, TreeSpec
from specbuild.runtime.speculation.tree_growth import Growth


def grown():
    """A root with children 1, 2, 3 and a child 4 of 1; node 3 is in the pool and not in the tree."""
    pool = Tree([0, 11, 12, 13, 14], [-1, 0, 0, 0, 1], [0, 1, 1, 1, 2])
    scores = [0.0, -0.2, -1.0, -3.0, -0.5]
    return Growth(TreeSpec.parse("best:3"), pool, scores=scores, rows=[-1] * 5, nodes=[0, 1, 2, 4])


def test_a_tree_is_noted_where_it_was_reached():
    record = Record()
    note(record, grown(), [0, 1])
    assert record.accepted == [True, False, False]
    assert record.likelihoods == pytest.approx([-0.2, -1.0, -0.3])
    assert record.orders == [(3, [0])]
    note(record, grown(), [0])
    note(record, grown(), [0, 1, 4])
    record = Record.sum([record, Record()])
    assert [record.accepted_of(nodes) for nodes in (1, 2, 3)] == [2 / 3, 1, 1]
    assert record.reach()[:4] == [0, 2 / 3, 1, 1]
    assert record.step() == (3 + 1) / (3 + 3 + 2)


@given(st.lists(st.tuples(st.floats(-9, 0), st.booleans()), min_size=1, max_size=40))
def test_what_is_likelier_never_has_a_lower_chance(trials):
    likelihoods, accepted = zip(*trials, strict=True)
    likely, chance = Record([*likelihoods], [*accepted]).calibration()
    assert likely == sorted(likely)
    assert chance == pytest.approx(sorted(chance))
    assert 0 < min(chance) <= max(chance) < 1


def test_a_calibration_says_what_came_true():
    rng, record = np.random.default_rng(0), Record()
    record.likelihoods = np.log(rng.uniform(0.05, 0.95, 20000)).tolist()
    record.accepted = [bool(rng.random() < np.exp(each) ** 2) for each in record.likelihoods]
    likely, chance = record.calibration()
    assert chance == pytest.approx(np.exp(2 * np.array(likely)), abs=0.05)
    assert record.error() < 0.02


def test_the_calibration_error_is_of_trials_that_were_not_calibrated_with():
    record = Record([-1.0, -0.5] * 200, [True] * 200 + [False] * 200)
    assert record.error() > 0.9


def test_lookup_by_what_matched():
    """A text that repeats itself, and one whose every single match is followed by something else."""
    repeats = [1, 2, 3, 4] * 20
    never = [9, *(token for i in range(10, 60) for token in (1, i))]
    good, bad = (lookup_chances([(text, 5)]) for text in (repeats, never))
    assert good[-1] > 0.9
    assert bad[1] < 0.1
    assert all(a <= b for a, b in itertools.pairwise(good))


def test_rounds_begin_where_the_last_one_ended():
    records = [Record(orders=[(3, ranks)]) for ranks in ([0, 2], [], [0], [], [1])]
    assert begun(records, 1) == [records[0], records[2], records[4]]
    assert begun(records, 3) == [records[0], records[3], records[4]]


def test_of_nothing_seen_there_is_doubt_and_no_chance_of_a_model():
    record = Record()
    found = record.chances([])
    assert (found["likely"], found["chance"], found["step"]) == ([0.0], [0.0], 1 / 2)
    assert {*found["reach"]} == {0.0}
    assert found["lookup"] == [0.25] * 13  # of four made-up trials one came true
    assert (record.trust(), record.error(), record.accepted_of(4)) == ({}, None, 0.0)
    assert Chances.of(found).step == 1 / 2, "a timing table may have it"
