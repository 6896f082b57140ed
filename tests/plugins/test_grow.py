"""Growing trees on the host: node for node what runtime/draft.py's Growth grows."""

import numpy as np
import pytest
from attention_oracle import ancestors
from calls import Growths, ints
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.backends.kernels.abi import Fault
from specbuild.runtime.speculation.tree import Tree, TreeSpec
from specbuild.runtime.speculation.tree_growth import Growth, likelihoods

TREES = ["chain:1", "chain:7", "topk:1,4", "topk:2,3", "topk:4,4", "topk:7,3", "topk:63,1", "topk:31,2"]
TREES += ["best:1", "best:3", "best:8", "best:16", "best:33", "best:63"]
FIRST_POSITION = 100


def level(rng, growths, values, holes):
    """What choosing gives the frontiers: each row's best tokens, at times fewer, and scores with ties or without."""
    rows = growths.frontiers if growths.levels else 1
    shape = growths.batch, rows, growths.best
    scores = rng.choice(values, shape) if values else rng.normal(0, 2, shape)
    scores = -np.sort(-scores.astype(np.float32), axis=2)
    choices = ints(np.argsort(rng.random((*shape[:2], 200)), axis=2)[..., : growths.best])
    if holes:
        left = rng.integers(0, growths.best + 1, (*shape[:2], 1))
        missing = np.arange(growths.best) >= left
        choices[missing], scores[missing] = -1, -np.inf
    return choices, scores


def grow_both(kernels, texts, seed, values, holes):
    """Grow a batch with the kernel and each sequence with Growth, and compare everything after every level."""
    rng = np.random.default_rng(seed)
    specs = [TreeSpec.parse(text) if text else None for text in texts]
    batch = range(len(specs))
    made = Growths(kernels, specs, [1000 + b for b in batch], [FIRST_POSITION * (b + 1) for b in batch])
    expected = [Growth(spec, Tree([1000 + b])) if spec else None for b, spec in enumerate(specs)]
    going = [b for b in batch if expected[b]]
    while going:
        choices, scores = level(rng, made, values, holes)
        made.grow(choices, scores)
        a = made.arrays
        for b in going:
            growth = expected[b]
            assert growth
            count, branch = len(growth.frontier), growth.spec.branch
            wide = scores[b, :count, :branch].astype(np.float64)
            growth.grow(choices[b, :count, :branch].astype(np.int64), likelihoods(wide))
            size, offset = len(growth.pool), len(growth.rows)
            assert a["pool_tokens"][b, :size].tolist() == growth.pool.tokens
            assert a["pool_parents"][b, :size].tolist() == growth.pool.parents
            np.testing.assert_allclose(a["pool_scores"][b, :size], growth.scores, rtol=1e-13, atol=1e-15)
            shape = made.shapes[b]
            assert (shape.size, shape.level, bool(shape.done)) == (size, growth.depth, growth.done)
            if growth.done:
                continue
            seen = growth.place()
            nodes = growth.frontier
            count = len(nodes)
            assert a["pool_rows"][b, :size].tolist() == [growth.rows.get(node, -1) for node in range(size)]
            assert (a["level_counts"][b], a["level_offset"][b], shape.run) == (count, offset, len(growth.rows))
            assert a["frontier"][b, :count].tolist() == nodes
            assert a["level_tokens"][b, :count].tolist() == [growth.pool.tokens[node] for node in nodes]
            root = FIRST_POSITION * (b + 1)
            assert a["positions"][b].tolist() == [root + growth.depth] * count + [root] * (made.frontiers - count)
            rows = a["level_parents"][b, : len(growth.rows)].tolist()
            if seen is not None:
                assert np.array_equal(ancestors(rows)[offset:], seen)
            else:
                assert rows == list(range(-1, len(rows) - 1))
        going = [b for b in going if not expected[b].done]
        for b in set(batch) - set(going):
            assert made.arrays["level_counts"][b] == 0
            assert not made.arrays["level_tokens"][b].any()
    made.finish()
    for b, growth in enumerate(expected):
        a = made.arrays
        if growth is None:
            assert a["tree_counts"][b] == 0
            assert (a["tree_parents"][b] == -1).all()
            continue
        growth.tree()
        kept, count = sorted(growth.nodes), len(growth.nodes)  # the host puts the likeliest branch first
        assert made.tree(b) == in_levels(growth.pool, kept)
        assert a["tree_nodes"][b].tolist() == kept + [-1] * (made.sizes["nodes"] - count)
        rows = [growth.rows.get(node, -1) for node in kept[1:]]
        assert a["node_rows"][b, :count].tolist() == [0, *(row + 1 if row >= 0 else -1 for row in rows)]
    assert not made.arrays["fault"].any()


def in_levels(pool, nodes):
    """The tree of some nodes of a pool, in the pool's order."""
    tree, index = Tree([pool.tokens[0]]), {0: 0}
    for node in nodes[1:]:
        index[node] = tree.add(pool.tokens[node], index[pool.parents[node]])
    return tree


@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**32 - 1),
    texts=st.lists(st.sampled_from([*TREES, None]), min_size=1, max_size=4).filter(any),
    ties=st.booleans(),
    holes=st.booleans(),
    order=st.integers(0, 3),
)
def test_ragged_batches(kernels, host, in_order, seed, texts, ties, holes, order):
    """Shapes differ, some trees are done early, some sequences are idle; scores of two values tie a lot."""
    with in_order(host, order):
        grow_both(kernels, texts, seed, [0.0, 1.0] if ties else None, holes)


NO_SHAPES = {"branch": 5, "expand": 9, "nodes": 17, "depth": 9, "width": 40}
NO_STATES = {"size": 10**9, "run": 10**6, "level": -5}


@pytest.mark.parametrize(
    ("field", "value", "levels"),
    [
        *((field, value, 0) for field, value in [*NO_SHAPES.items(), ("branch", 0), ("depth", -1)]),
        *((field, value, 1) for field, value in [*NO_STATES.items(), ("size", 0), ("run", -1)]),
    ],
)
def test_what_cannot_be_gets_the_root_alone(kernels, field, value, levels):
    """A shape that does not fit, and a state that nobody has set up; the other sequence grows."""
    spec, rng = TreeSpec.parse("best:16"), np.random.default_rng(0)
    made = Growths(kernels, [spec, spec], [7, 8], [0, 0])
    for _ in range(levels):
        made.grow(*level(rng, made, None, holes=False))
    setattr(made.shapes[0], field, value)
    made.grow(*level(rng, made, None, holes=False))
    made.finish()
    assert made.arrays["fault"].tolist() == [Fault.CAPACITY, Fault.NONE]
    assert made.tree(0) == Tree([7])
    assert len(made.tree(1)) >= 5
