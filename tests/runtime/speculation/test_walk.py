"""Verification: the walk against a naive one, and the text the same whatever is drafted."""

from __future__ import annotations

import random
from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.speculation.tree import Tree, walk

VOCAB = 4


def random_tree(rng: random.Random, root: int, nodes: int) -> Tree:
    tree = Tree([root])
    for _ in range(nodes):
        parent, token = rng.randrange(len(tree)), rng.randrange(VOCAB)
        if (parent, token) not in zip(tree.parents[1:], tree.tokens[1:], strict=True):
            tree.add(token, parent)
    return tree


def naive_walk(tree: Tree, choices: list[int]) -> list[tuple[int, int]]:
    node, found = 0, []
    while True:
        found.append((node, choices[node]))
        below = [n for n in range(1, len(tree)) if tree.parents[n] == node and tree.tokens[n] == choices[node]]
        if not below:
            return found
        (node,) = below


@settings(deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, 30), st.integers(1, 5))
def test_walk_against_a_naive_one(rng: random.Random, nodes: int, most: int) -> None:
    """It asks for no choice beyond what its caller takes, and ends where there is none."""
    tree = random_tree(rng, rng.randrange(VOCAB), nodes)
    choices, asked = [rng.randrange(VOCAB) for _ in range(len(tree))], list[int]()

    def choose(node: int) -> int:
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
    assert list(walk(tree, lambda node: None if node == last else choices[node])) == walked[:-1]
