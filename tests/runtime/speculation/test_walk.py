"""Verification: the walk against a naive one, and the text the same whatever is drafted."""

from itertools import islice

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from oracles import random_tree

from specbuild.runtime.speculation.tree import walk


def naive_walk(tree, choices):
    node, found = 0, []
    while True:
        found.append((node, choices[node]))
        below = [n for n in range(1, len(tree)) if tree.parents[n] == node and tree.tokens[n] == choices[node]]
        if not below:
            return found
        (node,) = below


@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(1, 5))
def test_walk_against_a_naive_one(seed, size, most):
    """It asks for no choice beyond what its caller takes."""
    rng = np.random.default_rng(seed)
    tree, asked = random_tree(rng, size, 4), list[int]()
    choices = rng.integers(0, 4, size).tolist()

    def choose(node):
        asked.append(node)
        return choices[node]

    walked = list(islice(walk(tree, choose), len(tree) + 1))
    assert walked == naive_walk(tree, choices)
    assert asked == [node for node, _ in walked]  # nothing is chosen where nothing was accepted
    last, bonus = walked[-1]
    assert [*tree.path(last), bonus] == [token for _, token in walked]
    asked.clear()
    assert list(islice(walk(tree, choose), most)) == walked[:most]
    assert len(asked) <= most
