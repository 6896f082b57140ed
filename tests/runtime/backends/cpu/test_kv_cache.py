"""The cache: rows move where a commit says, and nothing else does."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specbuild.runtime.backends.cpu.kv_cache import KVCache

LAYERS, SLOTS, HEADS, CAPACITY, HEAD_DIM = 3, 2, 2, 20, 4


def filled() -> KVCache:
    cache = KVCache(LAYERS, SLOTS, HEADS, CAPACITY, HEAD_DIM)
    cache.rows[:] = np.arange(cache.rows.size, dtype=np.float32).reshape(cache.rows.shape)
    return cache


@given(st.data())
def test_gather_moves_rows_in_every_layer_and_nothing_else(data: st.DataObject) -> None:
    """In any order, though source and destination overlap."""
    start, slot = data.draw(st.integers(0, CAPACITY - 1)), data.draw(st.integers(0, SLOTS - 1))
    rows = data.draw(st.lists(st.integers(start, CAPACITY - 1), unique=True))
    cache = filled()
    expected = cache.rows.copy()
    expected[:, slot, :, start : start + len(rows)] = cache.rows[:, slot][:, :, rows]
    cache.gather(slot, rows, start)
    assert np.array_equal(cache.rows, expected)
