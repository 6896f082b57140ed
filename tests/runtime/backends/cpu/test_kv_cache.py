"""The cache: rows move where a commit says, and nothing else does."""

import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.runtime.backends.cpu.kv_cache import KVCache
from specbuild.runtime.bundle.manifest import CacheShape

SLOTS, CAPACITY = 2, 20
SHAPES = st.builds(CacheShape, st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))


def filled(shapes):
    cache = KVCache(shapes, SLOTS, CAPACITY)
    for each in cache.views:
        each[:] = np.random.default_rng(each.size).random(each.shape)
    return cache


@given(st.data())
def test_gather_moves_rows_in_every_layer_and_nothing_else(data):
    """In any order, though source and destination overlap."""
    start, slot = data.draw(st.integers(0, CAPACITY - 1)), data.draw(st.integers(0, SLOTS - 1))
    rows = data.draw(st.lists(st.integers(start, CAPACITY - 1), unique=True))
    cache = filled(data.draw(st.lists(SHAPES, min_size=1, max_size=4)))
    expected = [each.copy() for each in cache.views]
    for each in expected:
        each[slot, :, start : start + len(rows)] = each[slot][:, rows]
    cache.gather(slot, rows, start)
    assert all(map(np.array_equal, cache.views, expected))


@given(st.lists(SHAPES, min_size=1, max_size=4), st.integers(0, CAPACITY))
def test_copy_takes_the_first_rows_of_every_layer(shapes, rows):
    cache = filled(shapes)
    expected = [each.copy() for each in cache.views]
    for each in expected:
        each[0, :, :rows] = each[1, :, :rows]
    cache.copy(0, 1, rows)
    assert all(map(np.array_equal, cache.views, expected))


def test_memory_is_that_of_rows_that_were_written():
    """Pages of 2 MB would map all of it at a text's first token."""
    cache = KVCache([CacheShape(4, 128, 128)] * 4, 4, 4096)
    before = resident()
    for each in cache.views:
        each[:, :, 0] = 1.0
    assert resident() - before < cache.nbytes / 16


def test_caches_that_no_memory_holds_are_a_memory_error():
    for capacity in (1 << 48, 1 << 60):
        with pytest.raises(MemoryError, match="bytes of caches"):
            KVCache([CacheShape(1, 64, 64)], 1, capacity)


def resident():
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
