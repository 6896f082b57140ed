"""The cache: rows move where a commit says, and nothing else does."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.backends.cpu.kv_cache import KVCache

LAYERS, SLOTS, HEADS, CAPACITY, HEAD_DIM = 3, 2, 2, 20, 4


def filled() -> KVCache:
    cache = KVCache(LAYERS, SLOTS, HEADS, CAPACITY, HEAD_DIM)
    cache.rows[:] = np.arange(cache.rows.size, dtype=np.float32).reshape(cache.rows.shape)
    return cache


@settings(deadline=None)
@given(st.data())
def test_gather_moves_rows_in_every_layer_and_nothing_else(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, CAPACITY - 1))
    rows = sorted(data.draw(st.sets(st.integers(start, CAPACITY - 1))))
    slot, cache = data.draw(st.integers(0, SLOTS - 1)), filled()
    before = cache.rows.copy()
    cache.gather(slot, rows, start)
    expected = before.copy()
    for layer in range(2 * LAYERS):
        for head in range(HEADS):
            for index, row in enumerate(rows):
                expected[layer, slot, head, start + index] = before[layer, slot, head, row]
    assert np.array_equal(cache.rows, expected)


def test_gather_where_source_and_destination_overlap_backwards() -> None:
    cache, before = filled(), filled().rows
    cache.gather(1, [6, 5, 7], 5)
    assert np.array_equal(cache.rows[:, 1, :, 5:8], before[:, 1][:, :, [6, 5, 7]])


def test_the_prefix_in_place_is_not_written() -> None:
    cache = filled()
    cache.rows[:, 0, :, 4:6] = np.nan
    cache.gather(0, [4, 5, 9], 4)
    assert np.isnan(cache.rows[:, 0, :, 4:6]).all()
    assert np.array_equal(cache.rows[:, 0, :, 6], filled().rows[:, 0, :, 9])


def test_a_view_is_one_slot_of_one_layer_and_no_copy() -> None:
    cache = filled()
    seen = set()
    for layer in range(LAYERS):
        for value in (False, True):
            for slot in range(SLOTS):
                view = cache.view(layer, value, slot)
                assert view.shape == (1, HEADS, CAPACITY, HEAD_DIM)
                assert view.flags.c_contiguous
                assert np.shares_memory(view, cache.rows)
                assert np.array_equal(view[0], cache.rows[2 * layer + value, slot])
                seen.add(view.ctypes.data)
    assert len(seen) == 2 * LAYERS * SLOTS


def test_a_copy_is_of_the_first_rows_of_every_layer_and_head() -> None:
    cache, before = filled(), filled().rows
    cache.copy(1, 0, 3)
    assert np.array_equal(cache.rows[:, 1, :, :3], before[:, 0, :, :3])
    assert np.array_equal(cache.rows[:, 1, :, 3:], before[:, 1, :, 3:])
    assert np.array_equal(cache.rows[:, 0], before[:, 0])
