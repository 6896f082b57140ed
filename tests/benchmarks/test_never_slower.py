"""A cell says how much faster `auto` is, and a run goes on where it was stopped."""

import json

import pytest

from benchmarks.cpu import never_slower, pairs

pytestmark = pytest.mark.nightly
FIGURES = {
    "pairs",
    "loads",
    "plain_tokens_per_s",
    "ratio",
    "interval",
    "tpot_p99",
    "longest_gap",
    "correction",
    "machine",
}


def test_a_cell_has_its_row_and_is_not_run_again(bundle, tmp_path):
    out = tmp_path / "out.json"
    given = ["--out", str(out), "--bundle", f"pair={bundle}", "--pairs", "2", "--loads", "2", "--turnover", "1"]
    given += ["--only", "concurrency=1 temperature=0.0$"]
    never_slower.main(given)
    found = json.loads(out.read_text())
    (row,) = found["cells"].values()
    assert row.keys() == FIGURES
    assert row["interval"][0] <= row["ratio"] <= row["interval"][1]
    row |= {"ratio": 0.9, "interval": [0.85, 0.95]}
    out.write_text(json.dumps(found))
    assert never_slower.main(given) == 1  # a cell that is surely slower
    assert json.loads(out.read_text()) == found


def test_both_ways_are_asked_the_same():
    chosen, params = pairs.requests(["a", "b", "c"], 1, 4, 0.8)
    assert chosen == ["b", "c", "a", "b"]
    assert len({each.cache_salt for each in params}) == 2  # the second "b" finds nothing of the first
    assert pairs.requests(["a", "b", "c"], 1, 4, 0.8) == (chosen, params)
    assert pairs.requests(["a", "b", "c"], 2, 4, 0.8)[1] != params
