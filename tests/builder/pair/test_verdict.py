"""The verdict on a pair: what acceptance would be needed, and what is said of what was measured."""

import pytest

from specbuild.builder.pair.verdict import judge, needed
from specbuild.runtime.speculation.timing_table import Times


def times(draft, node=0.0):
    """Of a target whose step takes 1, and `node` more for each node after the first."""
    record = {"verify": [[1, 1.0], [16, 1.0 + 15 * node]], "draft": [[1, draft], [16, draft]]}
    return Times.of(record | {"plain": 0.0, "round": 0.0, "level": 0.0}, 9)


def found(*speedups, needed=0.5, covered=1.0):
    """What was measured at temperatures 0, 1, …"""
    each = {"accepted": [0.625], "tree": "best:4", "auto": 1.5, "lookup": 1.25}
    measured = [{"temperature": float(t), "speedup": speedup} | each for t, speedup in enumerate(speedups)]
    return {"temperatures": measured, "needed": needed, "step_ratio": 0.25, "vocabulary": {"covered": covered}}


@pytest.mark.parametrize("cost", [0.1, 0.4, 0.9])
def test_where_verifying_costs_nothing_a_token_pays_that_comes_true_more_often_than_it_costs(cost):
    assert needed(times(cost)) == pytest.approx(cost, abs=0.002)


def test_dear_nodes_and_slow_drafts_need_more():
    least = needed(times(0.1)), needed(times(0.1, node=0.2)), needed(times(0.3, node=0.2))
    assert None not in least
    assert sorted(set(least)) == list(least)
    assert needed(times(1.0)) is None
    assert needed(times(0.6, node=0.5)) is None


@pytest.mark.parametrize(
    ("speedups", "verdict"),
    [
        ((1.12, 1.3), "worth it on this machine"),
        ((1.3, 1.05), "worth it on this machine at temperature 0 alone"),
        ((0.9, 1.2, 1.3), "worth it on this machine at temperature 1 and 2 alone"),
        ((1.08,), "not worth it on this machine"),
    ],
)
def test_verdicts(speedups, verdict):
    assert judge(found(*speedups))["verdict"] == verdict


def test_reasons():
    trees, auto, cost = judge(found(1.3, 0.9))["reasons"]
    assert "1.30× at temperature 0 (best:4), 0.90× at temperature 1 (best:4)" in trees
    assert "1.50× at temperature 0 (1.25× without the draft)" in auto
    assert "costs 0.25 of the target's: more than 50% of its tokens" in cost
    *_, cost, vocabulary = judge(found(0.5, needed=None, covered=0.75))["reasons"]
    assert "no acceptance would make up for that here" in cost
    assert "75% of the prompts' tokens" in vocabulary
