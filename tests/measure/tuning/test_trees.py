"""Trees of each size promise what the timing table says, and `auto` brings what rounds of real texts gave."""

import pytest

from specbuild.measure.tuning.chances import Record
from specbuild.measure.tuning.trees import names, overall, promises
from specbuild.runtime.speculation.timing_table import Times


def test_what_trees_promise(decoded):
    """By two prompts; best:8 lies between the probes of 4 and 32 nodes, a third of the way in powers of two."""
    texts = [
        {"off": decoded(10, 10, slow)}
        | {f"best:{n}": decoded(5, 9, slow * (1 + n), slow * t) for n, t in ((1, 0.2), (4, 0.8), (32, 1.4))}
        for slow in (1.0, 3.0, 1.0)
    ]
    records = [[Record(orders=[(32, [0, 3])])] * 5, [Record(orders=[(32, [0, 1, 2, 6])]), Record(orders=[(32, [])])]]
    table = {"verify": [[n, float(n)] for n in (1, 2, 64)], "draft": [], "plain": 0.5, "round": 9.0, "level": 9.0}
    found = {tree["nodes"]: tree for tree in promises(texts, records, Times.of(table, 64), 63)}
    assert [found[n]["seconds"] for n in (1, 2, 4, 8, 32)] == pytest.approx([2.2, 3.5, 5.8, 10.0, 34.4])
    # Rounds of best:1 begin at tokens 0, 2, 4 of the first text, and 0 of the second: each accepts one.
    assert (found[1]["accepted"], found[1]["speedup"]) == pytest.approx((1, 2 * 1.5 / 2.2))
    assert (found[4]["accepted"], found[4]["speedup"]) == pytest.approx((7 / 3, (10 / 3) * 1.5 / 5.8))
    assert found[8]["accepted"] == pytest.approx(8 / 3)
    assert [promise["tree"] for promise in promises(texts, records, Times.of(table, 64), 5)][-2:] == [
        "best:4",
        "best:5",
    ]


def test_what_trees_bring_whatever_slows_a_prompt(decoded):
    texts = [{"off": decoded(10, 10, slow), "auto": decoded(5, 20, 2 * slow)} for slow in (1.0, 5.0, 1.0)]
    texts[0]["auto"] = decoded(5, 20, 9.0)  # something else ran meanwhile
    assert overall(texts, "auto") == pytest.approx(60 / 65)


@pytest.mark.parametrize("most", [4, 5, 63])
def test_what_does_not_fit_is_the_largest_tree_once(most):
    found = [int(name.removeprefix("best:")) for name in names((1, 2, 8, 32), most)]
    assert found == sorted({min(nodes, most) for nodes in (1, 2, 8, 32)})
