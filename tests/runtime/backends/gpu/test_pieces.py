"""A text's steps: as short as they may be, or of lengths that follow from the rows alone."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.runtime.backends.executor import StepInput
from specbuild.runtime.backends.gpu.pieces import pieces
from specbuild.runtime.errors import ExecutionError

CAPACITY, SHORT, LONG = 100, 8, 24


def model(lengths=range(1, LONG + 1), tree=None):
    spec = SimpleNamespace(capacity=CAPACITY, name="target")
    return SimpleNamespace(lengths=lengths, tensors=SimpleNamespace(tree=tree), spec=spec, buckets=(1, 4, SHORT))


def chunk(start, count, logits=1):
    rows = range(start, start + count)
    return StepInput(0, start, start, list(rows), rows, None, logits, np.arange(count, dtype=np.float32)[:, None])


def steps(start, count, **how):
    """First row, tokens and nodes of each."""
    return [(p.start, len(p.tokens), n) for p, n in pieces(chunk(start, count), model(), **how)]


def by_row(start, count):
    """The nodes of the step that reads each row."""
    found = steps(start, count, by_row=True)
    assert all(first + nodes <= CAPACITY for first, _, nodes in found), "no step reaches beyond the cache"
    return {row: nodes for first, taken, nodes in found for row in range(first, first + taken)}


@given(st.integers(0, CAPACITY - SHORT - 1), st.data())
def test_a_row_says_how_long_its_step_is(start, data):
    """Wherever reading begins and ends."""
    count = data.draw(st.integers(1, CAPACITY - SHORT - start))
    whole = by_row(0, CAPACITY - SHORT)
    assert by_row(start, count) == {row: whole[row] for row in range(start, start + count)}


def test_the_first_rows_and_the_last_are_read_in_short_steps():
    """The last one has the logits."""
    assert steps(0, 90, by_row=True) == [(0, 8, 8), (8, 24, 24), (32, 24, 24), (56, 21, 24), (77, 8, 8), (85, 5, 8)]
    made = [piece for piece, _ in pieces(chunk(5, 10), model(), by_row=True)]
    assert [(p.committed, list(p.tokens), list(p.positions), p.logits) for p in made] == [
        (5, [5, 6, 7], [5, 6, 7], 0),
        (8, [*range(8, 15)], [*range(8, 15)], 1),
    ]
    assert [p.hidden.ravel().tolist() for p in made if p.hidden is not None] == [[0, 1, 2], [*range(3, 10)]]


@pytest.mark.parametrize(
    ("start", "count", "lengths", "tree", "found"),
    [
        (0, 20, range(1, LONG + 1), None, [(20, 20)]),
        (0, 20, (8, 24), None, [(20, 24)]),
        (78, 14, (8, 24), None, [(8, 8), (6, 8)]),
        (95, 5, (8, 24), "a tree", [(5, 8)]),
    ],
)
def test_the_shortest_step_otherwise(start, count, lengths, tree, found):
    assert [(len(p.tokens), n) for p, n in pieces(chunk(start, count), model(lengths, tree), by_row=False)] == found
    with pytest.raises(ExecutionError, match="do not fit the target's padding"):
        list(pieces(chunk(95, 5), model((8, 24)), by_row=False))
