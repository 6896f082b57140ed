"""What the benchmarks share: results a row a line, turns, and intervals."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import common

pytestmark = pytest.mark.nightly
LEAVES = st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
RESULTS = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=60)


@given(result=RESULTS)
def test_a_result_is_read_as_it_was_written(result):
    assert json.loads(common.rows(result)) == result


def test_a_saved_result_has_a_row_a_line_few_digits_and_facts_that_stay(tmp_path):
    table = {number: {"ratio": 2 / 3, "texts": 123456, "spread": (0.1, 12345.6)} for number in range(30)}
    text = common.save(tmp_path / "new" / "result.json", {"machine": common.machine(), "rows": table})
    assert '\n  "7": {"ratio": 0.6667, "texts": 123456, "spread": [0.1, 12350.0]},\n' in text
    assert {"cpu", "cores", "versions", "commit", "command"} <= json.loads(text)["machine"].keys()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["result.json"]


def test_ways_take_turns_in_alternating_order_after_a_warm_up():
    count = itertools.count()
    assert common.in_turns({"a": count.__next__, "b": count.__next__}, 2) == {"a": [3, 4], "b": [2, 5]}


def test_an_interval_is_of_whole_loads():
    """One load twice as fast and one half as fast, however many pairs say so, leave all between them open."""
    assert common.interval([[2.0] * 15, [0.5] * 15]) == pytest.approx([0.5, 2.0])
    assert common.interval([[2.0, 0.5]] * 15) == pytest.approx([1.0, 1.0])
