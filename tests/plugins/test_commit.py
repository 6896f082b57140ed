"""Moving accepted rows, on the kernels, against KVCache.gather."""

import numpy as np
import oracles
import pytest
from calls import cache_struct, commit, ints
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.backends.cpu.kv_cache import KVCache
from specbuild.runtime.backends.kernels.abi import Fault
from specbuild.runtime.bundle.manifest import CacheShape


def paged(rows, page_rows, rng):
    """The rows on pages in random order, and the page table."""
    layers, batch, heads, capacity, size = rows.shape
    each = capacity // page_rows
    table = ints(rng.permutation(batch * each).reshape(batch, each))
    pages = np.empty((layers, batch * each, heads, page_rows, size), dtype=rows.dtype)
    pages[:, table] = rows.reshape(layers, batch, heads, each, page_rows, size).swapaxes(2, 3)
    return pages, table


def linear(pages, table):
    layers, _, heads, page_rows, size = pages.shape
    batch, each = table.shape
    return pages[:, table].swapaxes(2, 3).reshape(layers, batch, heads, each * page_rows, size)


@settings(max_examples=80)
def random_cache(rng, shapes, batch, capacity):
    cache = KVCache(shapes, batch, capacity)
    for each in cache.views:
        each[:] = rng.random(each.shape, dtype=np.float32)
    return cache


@given(
    seed=st.integers(0, 2**32 - 1),
    nodes=st.integers(1, 64),
    batch=st.integers(1, 3),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    size=st.sampled_from([8, 16, 40, 128]),
    page_rows=st.sampled_from([0, 0, 1, 8, 16]),
    in_place=st.booleans(),
    order=st.integers(0, 3),
)
def test_two_caches(kernels, host, in_order, seed, nodes, batch, layers, heads, size, page_rows, in_place, order):
    """The target's with every node, in place; the draft's with some nodes, its rows in another order and shape."""
    rng = np.random.default_rng(seed)
    trees = [oracles.random_tree(rng, nodes, 50) for _ in range(batch)]
    path, length = np.full((batch, nodes), -1, dtype=np.int32), ints(rng.integers(0, 2, batch))
    for b, tree in enumerate(trees):
        node = int(rng.integers(0, nodes)) if length[b] else -1
        accepted = []
        while node >= 0:
            accepted.append(node)
            node = tree.parents[node]
        path[b, : len(accepted)], length[b] = accepted[::-1], len(accepted)
    capacity = 80 + 16
    base = ints(rng.integers(0, 16, (2, batch)))
    node_rows = np.full((batch, nodes), -1, dtype=np.int32)
    for b, tree in enumerate(trees):
        node_rows[b, 0] = 0
        row = 1
        for node in range(1, nodes):  # a node has a row only where its parent has one
            if node_rows[b, tree.parents[node]] >= 0 and rng.random() < 0.7:
                node_rows[b, node], row = row, row + 1
    caches = []
    for i in range(2):
        width = size * (i + 1) // 4
        caches.append(random_cache(rng, [CacheShape(heads, width, width)] * (layers + i), batch, capacity))
    rows = [np.stack(cache.views) for cache in caches]
    more = {}
    if page_rows:
        rows[1], table = paged(rows[1], page_rows, rng)
        more = {"page_table": table, "page_rows": page_rows, "capacity": capacity, "pages": rows[1].shape[1]}
    lengths = [base[0] if in_place else ints([7] * batch), ints([7] * batch)]
    old = [each.copy() for each in lengths]
    starts = base.copy()
    structs = (
        cache_struct(kernels, rows[0], base[0], lengths[0]),
        cache_struct(kernels, rows[1], base[1], lengths[1], node_rows, **more),
    )
    with in_order(host, order):
        out = commit(kernels, path, length, *structs)
    assert not out["fault"].any()
    assert not out["ticket"].any()
    for b in range(batch):
        accepted = path[b, : length[b]].tolist()
        own = [row for row in node_rows[b, accepted].tolist() if row >= 0]
        for i, moved in enumerate((accepted, own)):
            start = int(starts[i, b])
            caches[i].gather(b, [start + row for row in moved], start)
            assert out["kept"][i, b] == len(moved)
            assert lengths[i][b] == (start + len(moved) if moved else old[i][b])
    assert rows[0].tobytes() == np.stack(caches[0].views).tobytes()
    assert (linear(rows[1], more["page_table"]) if page_rows else rows[1]).tobytes() == np.stack(
        caches[1].views
    ).tobytes()


def test_one_cache_alone(kernels):
    rows = np.arange(8, dtype=np.float64).reshape(1, 1, 1, 8, 1)
    length = ints([2])
    out = commit(kernels, ints([[0, 2, 3, -1]]), ints([3]), cache_struct(kernels, rows, length, length))
    assert rows.ravel().tolist() == [0, 1, 2, 4, 5, 5, 6, 7]
    assert length.tolist() == [5]
    assert out["kept"].tolist() == [[3], [0]]


@pytest.mark.parametrize(
    ("path", "length", "base", "fault"),
    [
        ([0, 2, 1], 3, 0, Fault.NODE),
        ([0, 0, 1], 3, 0, Fault.NODE),
        ([0, 1, 3], 3, 0, Fault.NODE),
        ([0, -1, 2], 3, 0, Fault.NODE),
        ([0, 1, 2], 4, 0, Fault.NODE),
        ([0, 1, 2], -1, 0, Fault.NODE),
        ([0, 1, 2], 3, 6, Fault.CAPACITY),
        ([0, 1, 2], 3, -1, Fault.CAPACITY),
    ],
)
def test_faults_in_memory(kernels, path, length, base, fault):
    """The sequence stays as it was; the other one is committed."""
    rows = np.random.default_rng(0).random((2, 2, 1, 8, 4), dtype=np.float32)
    before, lengths = rows.copy(), ints([base, 1])
    out = commit(kernels, ints([path, [0, 2, -1]]), ints([length, 2]), cache_struct(kernels, rows, lengths, lengths))
    assert out["fault"].tolist() == [fault, 0]
    assert np.array_equal(rows[:, 0], before[:, 0])
    assert np.array_equal(rows[:, 1, :, 2], before[:, 1, :, 3])
    assert lengths.tolist() == [base, 3]


@pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1])
@pytest.mark.parametrize(
    ("at", "fault"),
    [(0, Fault.NONE), (1, Fault.PAGE), (2, Fault.PAGE), (3, Fault.PAGE)],
    ids=lambda each: str(int(each)),
)
def test_a_page_that_is_none(kernels, wrong, at, fault):
    """Where a row would come from, or go to, and nowhere else; every layer of the sequence stays as it was."""
    pages = np.random.default_rng(0).random((4, 4, 200, 16, 4), dtype=np.float32)  # two blocks a layer
    before, lengths, table = pages.copy(), ints([17, 17]), ints([[0, 3, 1, 2]] * 2)
    table[0, at] = wrong
    path = [0, *range(31, 47)]  # rows 48 to 63 come to 18 to 33
    more = {"page_table": table, "page_rows": 16, "pages": 4, "capacity": 64}
    cache = cache_struct(kernels, pages, lengths, lengths, **more)
    out = commit(kernels, ints([path + [-1] * 47, [-1] * 64]), ints([17, 0]), cache)
    assert out["fault"].tolist() == [fault, 0]
    assert out["kept"].tolist() == [[0 if fault else 17, 0], [0, 0]]
    assert lengths.tolist() == [17 if fault else 34, 17]
    assert (pages.tobytes() == before.tobytes()) == bool(fault)
