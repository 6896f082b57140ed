"""A text's steps: as short as they may be, or of lengths that follow from the rows alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.runtime.backends.executor import StepInput
from specbuild.runtime.backends.gpu.pieces import pieces
from specbuild.runtime.errors import ExecutionError

CAPACITY, SHORT, LONG = 100, 8, 24


def model(lengths: Any = range(1, LONG + 1), tree: Any = None) -> Any:
    spec = SimpleNamespace(capacity=CAPACITY, name="target")
    return SimpleNamespace(lengths=lengths, tree=tree, spec=spec, buckets=(1, 4, SHORT))


def chunk(start: int, count: int, logits: int = 1) -> StepInput:
    rows = range(start, start + count)
    return StepInput(0, start, start, list(rows), rows, None, logits, np.arange(count, dtype=np.float32)[:, None])


def steps(start: int, count: int, **how: Any) -> list[tuple[int, int, int]]:
    """First row, tokens and nodes of each."""
    return [(p.start, len(p.tokens), n) for p, n in pieces(chunk(start, count), model(), **how)]


@given(st.integers(0, CAPACITY - SHORT - 1), st.data())
def test_a_row_says_how_long_its_step_is(start: int, data: st.DataObject) -> None:
    """Wherever reading begins and ends; no step reaches beyond the cache."""
    count = data.draw(st.integers(1, CAPACITY - SHORT - start))
    found = {
        row: nodes for first, taken, nodes in steps(start, count, by_row=True) for row in range(first, first + taken)
    }
    whole = {
        row: n for first, taken, n in steps(0, CAPACITY - SHORT, by_row=True) for row in range(first, first + taken)
    }
    assert found == {row: whole[row] for row in range(start, start + count)}
    assert all(first + nodes <= CAPACITY for first, _, nodes in steps(start, count, by_row=True))


def test_the_first_rows_and_the_last_are_read_in_short_steps() -> None:
    assert steps(0, 90, by_row=True) == [(0, 8, 8), (8, 24, 24), (32, 24, 24), (56, 21, 24), (77, 8, 8), (85, 5, 8)]
    assert steps(3, 2, by_row=True) == [(3, 2, 8)]


def test_the_last_piece_has_the_logits() -> None:
    made = [p for p, _ in pieces(chunk(5, 10), model(), by_row=True)]
    assert [(p.committed, list(p.tokens), list(p.positions), p.logits) for p in made] == [
        (5, [5, 6, 7], [5, 6, 7], 0),
        (8, [*range(8, 15)], [*range(8, 15)], 1),
    ]
    assert [p.hidden.ravel().tolist() for p in made if p.hidden is not None] == [[0, 1, 2], [*range(3, 10)]]


def test_the_shortest_step_otherwise() -> None:
    assert steps(0, 20, by_row=False) == [(0, 20, 20)]
    found = [n for _, n in pieces(chunk(0, 20), model((8, 24)), by_row=False)]
    assert found == [24]
    found = [(len(p.tokens), n) for p, n in pieces(chunk(78, 14), model((8, 24)), by_row=False)]
    assert found == [(8, 8), (6, 8)]
    with pytest.raises(ExecutionError, match="do not fit the target's padding"):
        list(pieces(chunk(95, 5), model((8, 24)), by_row=False))
    assert [n for _, n in pieces(chunk(95, 5), model((8, 24), tree="a tree"), by_row=False)] == [8]
