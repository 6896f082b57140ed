"""The timing table says what steps take in rounds: the measured steps, scaled by what rounds of real texts took."""

import pytest

from specbuild.measure.tuning.times import host_times, steps_of, times_of
from specbuild.runtime import Engine

VERIFY, DRAFT = [[1, 1.0], [2, 2.0], [8, 4.0], [64, 8.0]], [[1, 0.1], [8, 0.1]]
FOUND = {1: {"verify": VERIFY, "draft": DRAFT}, 2: {"verify": [[1, 1.5], [4, 3.0]], "draft": [[1, 0.3]]}}


@pytest.fixture
def texts(decoded):
    """One prompt's: verifying 2 nodes took half as long again as alone, 8 nodes twice as long, like the draft."""
    rounds = {"off": (1.0, 0.1, 0.0), "best:1": (3.0, 0.5, 0.2), "best:7": (8.0, 1.1, 0.6)}
    return [{name: decoded(5, 9, *seconds) for name, seconds in rounds.items()}]


def test_the_loops_own_times():
    found = host_times([0.1, 0.4, 0.9, 0.4 + 6.5 * 0.2], 7.5)
    assert found == pytest.approx({"plain": 0.1, "round": 0.2, "level": 0.2})
    assert host_times([0.3, 0.2, 0.1], 4) == {"plain": 0.3, "round": 0.3, "level": 0}, "trees that are faster"


def test_steps_are_scaled_to_what_rounds_took(texts):
    """Between sizes that were looked at by the logarithm of the nodes; of a batch the loop's own time is as often."""
    table = times_of(FOUND, texts, texts, levels=3.0)
    assert list(table) == ["1", "2"]
    host = {"plain": 0.1, "round": 0.2, "level": 0.1}
    verify = [[1, 1.0], [2, 3.0], [8, 8.0], [64, 16.0]]
    assert table["1"]["verify"] == [pytest.approx(pair) for pair in verify]
    assert table["1"]["draft"] == [pytest.approx(pair) for pair in ([1, 0.2], [8, 0.2])]  # 0.6 s for three steps
    assert {name: table["1"][name] for name in host} == table["1"]["sampled"] == pytest.approx(host)
    assert table["2"]["verify"] == [pytest.approx(pair) for pair in ([1, 1.5], [4, 3.0 * 1.75])]
    assert table["2"]["sampled"] == pytest.approx({name: 2 * took for name, took in host.items()})
    assert "once" not in table["1"]


def test_a_draft_of_one_step_has_its_time_once(texts):
    """Of eight nodes: the two tokens it may owe, and masks for six further levels."""
    table = times_of(FOUND, texts, texts, levels=3.0, together=True)
    assert table["1"]["draft"] == [pytest.approx(pair) for pair in ([1, 0.6], [8, 0.6])]
    assert [table[batch]["once"] for batch in ("1", "2")] == pytest.approx([0.6, 1.8])


def test_without_a_draft_only_plain_rounds_are_looked_at(decoded):
    texts = [{"off": decoded(10, 10, 3.0, 0.5, 0.0)}]
    table = times_of({1: {"verify": VERIFY, "draft": []}}, texts, texts, levels=1.0, together=True)
    assert table["1"]["verify"] == [[nodes, 3.0 * took] for nodes, took in VERIFY]
    assert (table["1"]["draft"], table["1"]["level"], "once" in table["1"]) == ([], 0.0, False)


def test_no_step_is_larger_than_the_largest_bucket(bundle):
    with Engine.load(bundle, prefix_caching=False) as engine, engine.scheduler.exclusive() as loop:
        steps = steps_of(loop, 5, 40)
        assert list(steps.by(len)) == [(name, nodes) for nodes in (1, 2, 3, 4, 5) for name in ("target", "draft")]
