"""The best tree of a size, which Sequoia's dynamic programme finds, against every tree there is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.measure.tuning.sequoia import best_tree


def every_tree(chances, nodes, depth=0, rank=0, reached=1.0):
    """The most that any tree of at most `nodes` brings: children of one node from a rank on, by enumeration."""
    if nodes == 0 or depth == len(chances) or rank == len(chances[depth]):
        return 0.0
    chance, best = reached * chances[depth][rank], 0.0
    for mine in range(1, nodes + 1):
        below = every_tree(chances, mine - 1, depth + 1, 0, chance)
        best = max(best, chance + below + every_tree(chances, nodes - mine, depth, rank + 1, reached))
    return best


def value(chances, parents):
    """What a tree brings, by its definition."""
    depths, reached, ranks = {-1: 0}, {-1: 1.0}, dict[int, int]()
    for node, parent in enumerate(parents):
        rank = ranks[parent] = ranks.get(parent, -1) + 1
        depths[node], reached[node] = depths[parent] + 1, reached[parent] * chances[depths[parent]][rank]
    return sum(reached.values()) - 1


falling = st.lists(st.floats(0.01, 1), min_size=1, max_size=3).map(lambda row: sorted(row, reverse=True))


@given(st.lists(falling, min_size=1, max_size=4), st.integers(0, 7))
def test_no_tree_is_better(chances, nodes):
    found, parents = best_tree(chances, nodes)
    assert found == pytest.approx(every_tree(chances, nodes))
    assert found == pytest.approx(value(chances, parents))
    assert len(parents) <= nodes
    assert all(parent < node for node, parent in enumerate(parents))


def test_shapes():
    """A sure first child makes a chain, equal children a bush, and no chance at all no tree."""
    assert best_tree([[1.0, 0.4]] * 8, 5) == (5.0, [-1, 0, 1, 2, 3])
    assert best_tree([[0.25] * 4] * 8, 4)[1] == [-1] * 4
    assert best_tree([[0.0]] * 8, 4) == (0.0, [])
    assert best_tree([[0.9, 0.5]], 9)[1] == [-1, -1]
