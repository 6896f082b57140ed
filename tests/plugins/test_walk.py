"""The walk on the host against runtime/accept.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import oracles
import pytest
from calls import POISON, history, ints, poisoned, struct, tree_arrays, walk
from device import HostKernels
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.backends.kernels.abi import Fault, KernelLibrary, Walk
from specbuild.runtime.errors import OptionError
from specbuild.runtime.speculation import acceptance
from specbuild.runtime.speculation.tree import Tree


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    nodes=st.integers(1, 64),
    batch=st.integers(1, 4),
    vocab=st.sampled_from([2, 5, 40]),
    order=st.integers(0, 3),
)
def test_anything(
    kernels: HostKernels,
    host: KernelLibrary,
    in_order: Callable[..., Any],
    seed: int,
    nodes: int,
    batch: int,
    vocab: int,
    order: int,
) -> None:
    rng = np.random.default_rng(seed)
    trees = [oracles.random_tree(rng, int(rng.integers(1, nodes + 1)), vocab) for _ in range(batch)]
    tokens, parents, counts = tree_arrays(trees, nodes)
    choices = ints(rng.integers(-1, vocab, (batch, nodes)))
    for b, tree in enumerate(trees):
        for node in range(1, len(tree)):
            if rng.random() < 0.7:
                choices[b, tree.parents[node]] = tree.tokens[node]
    texts = [rng.integers(0, vocab, (2, 5)).tolist() for _ in trees]
    past = np.stack([history(vocab, *text) for text in texts])
    with in_order(host, order):
        out = walk(kernels, tokens, parents, choices, counts=counts, history=past, vocab=vocab)
    assert not out["fault"].any()
    for b, tree in enumerate(trees):
        path, emitted = zip(*acceptance.walk(tree, lambda node, b=b: int(choices[b, node])), strict=True)
        length = out["length"][b]
        assert out["path"][b].tolist() == [*path, *[-1] * (nodes - length)]
        assert out["emitted"][b].tolist() == [*emitted, *[-1] * (nodes - length)]
        prompt, output = texts[b]
        assert out["roots"][b] == emitted[-1]
        assert out["pair"][b].tolist() == [tree.tokens[0], *emitted][-2:]
        kept = [token for token in emitted if token >= 0]
        assert np.array_equal(past[b], history(vocab, prompt, [*output, *kept]))


def test_a_chain_needs_no_parents(kernels: HostKernels) -> None:
    tokens = ints([range(64), range(64)])
    choices = ints([np.arange(64) + 1] * 2)
    choices[1, 40] = 0
    out = walk(kernels, tokens, None, choices)
    assert out["length"].tolist() == [64, 41]
    assert out["path"][1, :42].tolist() == [*range(41), -1]
    assert out["emitted"][:, 63].tolist() == [64, -1]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), nodes=st.integers(1, 64), batch=st.integers(1, 4))
def test_the_walk_may_keep_to_the_trunk(kernels: HostKernels, seed: int, nodes: int, batch: int) -> None:
    """It ends with the choice that leaves it, be that a node's token or not."""
    rng = np.random.default_rng(seed)
    trees = [oracles.random_tree(rng, int(rng.integers(1, nodes + 1)), 5) for _ in range(batch)]
    tokens, parents, counts = tree_arrays(trees, nodes)
    choices = ints(rng.integers(0, 5, (batch, nodes)))
    for b, tree in enumerate(trees):
        for node in reversed(range(1, len(tree))):  # the first child is the likeliest
            if rng.random() < 0.9:
                choices[b, tree.parents[node]] = tree.tokens[node]
    out = walk(kernels, tokens, parents, choices, counts=counts, trunk=1)
    for b, tree in enumerate(trees):
        path = [node for node, _ in acceptance.walk(tree, lambda node, b=b: int(choices[b, node]))]
        kept = [node for at, node in enumerate(path) if at == node]
        assert out["path"][b].tolist() == [*kept, *[-1] * (nodes - len(kept))]
        assert out["emitted"][b].tolist() == [*choices[b, kept].tolist(), *[-1] * (nodes - len(kept))]
        assert out["roots"][b] == choices[b, kept[-1]]


def test_the_next_round_may_start_elsewhere(kernels: HostKernels) -> None:
    tokens, choices = ints([[5, 6, 7], [5, 6, 7]]), ints([[6, 9, 1], [8, 1, 1]])
    out = walk(kernels, tokens, None, choices)
    assert out["roots"].tolist() == [9, 8]
    assert out["pair"].tolist() == [[6, 9], [5, 8]]
    out = walk(kernels, tokens, None, choices, roots=None, pair=None)
    assert out["emitted"].tolist() == [[6, 9, -1], [8, -1, -1]]
    assert (out["roots"] == POISON).all()
    assert (out["pair"] == POISON).all()


def test_idle_sequences_and_faults(kernels: HostKernels) -> None:
    trees = [Tree([0, 1, 2], parents, [0, 1, 1]) for parents in ([-1, 0, 0], [-1, 2, 0], [-1, 0, 0], [-1, 0, -2])]
    tokens, parents, _ = tree_arrays(trees, 3)
    out = walk(kernels, tokens, parents, np.full((4, 3), 2, dtype=np.int32), counts=ints([0, 3, 4, 3]))
    assert out["length"].tolist() == [0] * 4
    assert (out["path"] == -1).all()
    assert (out["roots"] == POISON).all()
    assert (out["pair"] == POISON).all()
    assert out["fault"].tolist() == [Fault.NONE, Fault.PARENT, Fault.CAPACITY, Fault.PARENT]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch 0"),
        ({"nodes": 65}, "a tree of 65 nodes"),
        ({"history": 64}, "a vocabulary of 0"),
        ({"choices": None}, "choices is null"),
        ({"length": None}, "length is null"),
    ],
)
def test_refused(kernels: HostKernels, change: dict[str, Any], message: str) -> None:
    arrays = {name: poisoned(1, 2) for name in ("tokens", "choices", "path", "length", "emitted")}
    with pytest.raises(OptionError, match=message):
        kernels.launch("walk_tree", struct(kernels, Walk, **{**arrays, "batch": 1, "nodes": 2} | change))
