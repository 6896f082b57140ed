"""The book of cache rows knows where each slot's rows end, and their positions and hidden states, as naive lists do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.runtime.backends.executor import ModelSpec, StepInput
from specbuild.runtime.backends.slot_rows import SlotRows
from specbuild.runtime.errors import ExecutionError

CAPACITY, SLOTS, MOST = 20, 3, 6


def spec(windows: tuple[int, ...] = (0, 4), hidden: int = 2) -> ModelSpec:
    return ModelSpec("target", 1, 1, 1, 12, CAPACITY, MOST, windows, hidden=hidden)


def nodes(slot: int, start: int, positions: list[int]) -> StepInput:
    return StepInput(slot, start, start, [0] * len(positions), positions, None, 1)


@given(st.integers(0, CAPACITY + 1), st.integers(1, MOST + 1))
def test_nodes_have_to_fit_the_step_and_the_cache(start: int, count: int) -> None:
    """Else nothing is written."""
    book = SlotRows(spec(), SLOTS)
    book.write(nodes(1, 0, [7, 7, 7]), MOST)
    positions = [7, 7, 7]
    if count <= MOST and start + count <= CAPACITY:
        book.write(nodes(1, start, [5] * count), MOST)
        assert book.ends == [0, start + count, 0]
        assert book.positions[1, start : start + count].tolist() == [5] * count
        return
    with pytest.raises(ExecutionError, match=f"^{count} nodes from row {start} on do not fit the target$"):
        book.write(nodes(1, start, [5] * count), MOST)
    assert (book.ends, book.positions[1, :3].tolist()) == ([0, 3, 0], positions)
