"""The tree's mask on the kernels, in every type."""

import ml_dtypes
import numpy as np
import oracles
from calls import DTYPES, ints, poisoned, struct, tree_arrays
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.backends.kernels.abi import Fault, Mask
from specbuild.runtime.speculation.tree import Tree

TYPES = (np.bool_, np.float32, np.float16, ml_dtypes.bfloat16)


def launch(kernels, nodes, capacity, dtype, **fields):
    """The mask `[B, N, S]` and the faults; outputs among the fields stay theirs."""
    batch = len(fields["cache_len"])
    output = np.full((batch, nodes, capacity), 1 if dtype == np.bool_ else 77, dtype=dtype)
    fault = np.zeros(batch, dtype=np.int32)
    sizes = {"batch": batch, "nodes": nodes, "capacity": capacity, "dtype": DTYPES[np.dtype(dtype)]}
    kernels.launch("tree_mask", struct(kernels, Mask, output=output, fault=fault, **sizes, **fields))
    return output, fault


def seen(output):
    """As bool, from 0 and −∞, of which nothing else is there."""
    if output.dtype == np.bool_:
        assert set(np.unique(output.view(np.uint8)).tolist()) <= {0, 1}
        return output
    wide = output.astype(np.float32)
    assert (np.isneginf(wide) | (wide == 0)).all()
    return wide == 0


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 3),
    nodes=st.integers(1, 24),
    before=st.integers(0, 40),
    context=st.sampled_from([0, 5, 1500]),
    window=st.sampled_from([0, 0, 1, 3, 1000]),
    shift=st.sampled_from([0, 0, -1, 7]),
    dtype=st.sampled_from(TYPES),
    tree=st.booleans(),
    order=st.integers(0, 3),
)
def test_anything(kernels, host, in_order, seed, batch, nodes, before, context, window, shift, dtype, tree, order):
    rng = np.random.default_rng(seed)
    total = nodes + before
    counts, offsets = ints(rng.integers(0, nodes + 1, batch)), ints(rng.integers(0, before + 1, batch))
    committed = ints(rng.integers(0, context + 1, batch))
    trees = [oracles.random_tree(rng, total, 50) if tree else Tree.chain([0] * total) for _ in range(batch)]
    _, parents, _ = tree_arrays(trees, total)
    capacity = int(committed.max()) + total
    positions, rows = poisoned(batch, nodes), poisoned(batch)
    fields = {"cache_len": committed - ints(shift), "tree_offset": offsets, "counts": counts, "window": window}
    fields |= {"positions": positions, "rows": rows, "shift": shift}
    with in_order(host, order):
        output, fault = launch(
            kernels, nodes, capacity, dtype, parents=parents if tree else None, tree_nodes=total, **fields
        )
    assert not fault.any()
    for b in range(batch):
        sizes = int(committed[b]), int(offsets[b]), int(counts[b]), nodes, capacity, window
        assert np.array_equal(seen(output[b]), oracles.mask(trees[b], *sizes))
        depths = ints(trees[b].depths)[offsets[b] :][: counts[b]]
        assert positions[b].tolist() == [*(committed[b] + depths), *[0] * (nodes - counts[b])]
    assert np.array_equal(rows, committed + offsets)


def test_faults_in_memory(kernels):
    """Whoever reads the mask of a faulty sequence attends to row 0."""
    parents = ints([[-1, 0, 1], [-1, 2, 1], [-1, 0, 1], [-1, 0, 1], [-1, 0, 1]])
    fields = {"cache_len": ints([2, 2, 8, -1, 2]), "counts": ints([3, 3, 3, 3, 4]), "tree_nodes": 3}
    output, fault = launch(kernels, 3, 10, np.float32, parents=parents, **fields)
    assert fault.tolist() == [Fault.NONE, Fault.PARENT, Fault.CAPACITY, Fault.CAPACITY, Fault.CAPACITY]
    assert seen(output)[0].sum() == 3 + 4 + 5
    assert (seen(output)[1:] == (np.arange(10) == 0)).all()
    for far, shift in ((2**31 - 2, 0), (2**31 - 2, 9), (3, -4), (-(2**31), -9)):
        one = {"parents": parents[:1], "cache_len": ints([far]), "shift": shift, "tree_nodes": 3}
        assert launch(kernels, 3, 10, np.float32, **one)[1] == Fault.CAPACITY


def test_padded_rows_stay_in_the_slot(kernels):
    """Whatever is in memory; and whose nodes would lie elsewhere than the mask says is at fault."""
    positions, rows = poisoned(5, 4), poisoned(5)
    fields = {"cache_len": ints([6, 7, 7, -9, 2**31 - 1]), "counts": ints([4, 0, 1, 4, 0]), "shift": -1}
    output, fault = launch(kernels, 4, 9, np.bool_, positions=positions, rows=rows, **fields)
    assert rows.tolist() == [5, 5, 5, 0, 5]
    assert fault.tolist() == [0, 0, Fault.CAPACITY, Fault.CAPACITY, Fault.CAPACITY]
    assert positions.tolist() == [[5, 6, 7, 8], *[[0] * 4] * 4]
    assert (output[1:] == (np.arange(9) == 0)).all()
    assert not launch(kernels, 4, 9, np.bool_, cache_len=ints([7]), counts=ints([1]))[1].any()  # no rows, no scatter


def test_without_an_output_it_is_tree_attention_s_check(kernels):
    """The rows are cache_len's, padding needs no room, and whoever is at fault is found."""
    parents, rows, fault = ints([[-1, 0, 1], [-1, 0, 0], [-1, 2, 1], *[[-1, 0, 1]] * 2]), poisoned(5), ints([0] * 5)
    fields = {"cache_len": ints([2, 1497, 2, 1498, -1]), "tree_offset": ints([1, 0, 1, 1, 0]), "shift": 1}
    fields |= {"counts": ints([2, 2, 1, 2, 1]), "parents": parents, "tree_nodes": 3, "rows": rows, "fault": fault}
    sizes = {"batch": 5, "nodes": 2, "capacity": 1501, "dtype": DTYPES[np.dtype(np.bool_)]}
    kernels.launch("tree_mask", struct(kernels, Mask, **sizes, **fields))
    assert rows.tolist() == [3, 1498, 3, 1499, 0]
    assert fault.tolist() == [0, 0, Fault.PARENT, Fault.CAPACITY, 0]
