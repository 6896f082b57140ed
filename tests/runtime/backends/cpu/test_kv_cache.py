"""The cache: rows move where a commit says, and nothing else does."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
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


def test_memory_is_that_of_rows_that_were_written() -> None:
    """Pages of 2 MB would map all of it at a text's first token."""
    cache = KVCache(4, 4, 4, 4096, 128)
    before = resident()
    cache.rows[:, :, :, 0] = 1.0
    assert resident() - before < cache.nbytes / 16


def test_caches_that_no_memory_holds_are_a_memory_error() -> None:
    for capacity in (1 << 48, 1 << 60):
        with pytest.raises(MemoryError, match="bytes of caches"):
            KVCache(1, 1, 1, capacity, 64)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
