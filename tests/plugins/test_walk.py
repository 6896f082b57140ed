"""The walk on the host against runtime/accept.py."""

import numpy as np
import oracles
from calls import POISON, history, ints, tree_arrays, walk
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.backends.kernels.abi import Fault
from specbuild.runtime.speculation.tree import Tree
from specbuild.runtime.speculation.tree import walk as walk_tree


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    nodes=st.integers(1, 64),
    batch=st.integers(1, 4),
    vocab=st.sampled_from([2, 5, 40]),
    trunk=st.booleans(),
    chain=st.booleans(),
    order=st.integers(0, 3),
)
def test_anything(kernels, host, in_order, seed, nodes, batch, vocab, trunk, chain, order):
    """With `trunk` it ends with the choice that leaves the nodes 0, 1, 2, …; a chain needs no parents."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, nodes + 1, batch).tolist()
    trees = [oracles.random_tree(rng, size, vocab) for size in sizes]
    if chain:
        trees = [Tree.chain(rng.integers(0, vocab, size).tolist()) for size in sizes]
    tokens, parents, counts = tree_arrays(trees, nodes)
    choices = ints(rng.integers(-1, vocab, (batch, nodes)))
    for b, tree in enumerate(trees):
        for node in reversed(range(1, len(tree))):  # the first child is the likeliest
            if rng.random() < 0.7:
                choices[b, tree.parents[node]] = tree.tokens[node]
    texts = [rng.integers(0, vocab, (2, 5)).tolist() for _ in trees]
    past = np.stack([history(vocab, *text) for text in texts])
    with in_order(host, order):
        more = {"counts": counts, "history": past, "vocab": vocab, "trunk": int(trunk)}
        out = walk(kernels, tokens, None if chain else parents, choices, **more)
    assert not out["fault"].any()
    for b, tree in enumerate(trees):
        walked = walk_tree(tree, lambda node, b=b: int(choices[b, node]))
        path, emitted = zip(*[step for at, step in enumerate(walked) if not trunk or step[0] == at], strict=True)
        length = out["length"][b]
        assert out["path"][b].tolist() == [*path, *[-1] * (nodes - length)]
        assert out["emitted"][b].tolist() == [*emitted, *[-1] * (nodes - length)]
        prompt, output = texts[b]
        assert out["roots"][b] == emitted[-1]
        assert out["pair"][b].tolist() == [tree.tokens[0], *emitted][-2:]
        kept = [token for token in emitted if token >= 0]
        assert np.array_equal(past[b], history(vocab, prompt, [*output, *kept]))


def test_the_next_round_may_start_elsewhere(kernels):
    tokens, choices = ints([[5, 6, 7], [5, 6, 7]]), ints([[6, 9, 1], [8, 1, 1]])
    out = walk(kernels, tokens, None, choices)
    assert out["roots"].tolist() == [9, 8]
    assert out["pair"].tolist() == [[6, 9], [5, 8]]
    out = walk(kernels, tokens, None, choices, roots=None, pair=None)
    assert out["emitted"].tolist() == [[6, 9, -1], [8, -1, -1]]
    assert (out["roots"] == POISON).all()
    assert (out["pair"] == POISON).all()


def test_idle_sequences_and_faults(kernels):
    trees = [Tree([0, 1, 2], parents, [0, 1, 1]) for parents in ([-1, 0, 0], [-1, 2, 0], [-1, 0, 0], [-1, 0, -2])]
    tokens, parents, _ = tree_arrays(trees, 3)
    out = walk(kernels, tokens, parents, np.full((4, 3), 2, dtype=np.int32), counts=ints([0, 3, 4, 3]))
    assert out["length"].tolist() == [0] * 4
    assert (out["path"] == -1).all()
    assert (out["roots"] == POISON).all()
    assert (out["pair"] == POISON).all()
    assert out["fault"].tolist() == [Fault.NONE, Fault.PARENT, Fault.CAPACITY, Fault.PARENT]
