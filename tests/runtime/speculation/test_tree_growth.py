"""The growing tree keeps what a brute-force search would keep, level by level, and says whose rows each node sees."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specbuild.runtime.speculation.tree import Tree, TreeSpec
from specbuild.runtime.speculation.tree_growth import Growth, best_tokens

VOCAB = 12


def log_share(scores, count):
    """log softmax among the `count` best scores, −inf for all others."""
    wide = scores.astype(np.float64)
    wide[np.argsort(-wide, kind="stable")[count:]] = -np.inf
    with np.errstate(divide="ignore"):
        return wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())


def paths(tree):
    return {tuple(tree.path(node)) for node in range(1, len(tree))}


@st.composite
def specs(draw):
    """Shapes that the grammar has no word for, too."""
    branch, width, depth = (draw(st.integers(1, most)) for most in (4, 6, 5))
    expand, nodes = draw(st.integers(1, width)), draw(st.integers(1, 20))
    return TreeSpec("any", branch, width, expand, depth, nodes)


def brute_force(model, spec):
    """Every candidate that a level keeps, in order, and those of them that make the tree; by lists and sorting."""
    scores = {(): 0.0}
    frontier = [()]

    def best():
        return set(sorted([path for path in scores if path], key=lambda path: -scores[path])[: spec.nodes])

    for _ in range(spec.depth):
        candidates = []
        for path in frontier:
            shares = log_share(model([0, *path]), spec.branch)
            children = [token for token in np.argsort(-shares, kind="stable").tolist() if shares[token] > -np.inf]
            candidates += [((*path, token), scores[path] + float(shares[token])) for token in children]
        level = dict(sorted(candidates, key=lambda item: -item[1])[: spec.width])
        scores |= level
        frontier = [path for path in level if path in best()][: spec.expand]
        if not frontier:
            break
    return list(scores)[1:], best()


def grown(spec, model):
    """A growth that is over, whose rows were given one after another to nodes that see their ancestors' alone."""
    growth, run = Growth(spec, Tree([0])), 0
    while not growth.done:
        frontier = list(growth.frontier)
        if growth.depth:
            visible = growth.place()
            assert [growth.rows[node] for node in frontier] == list(range(run, run + len(frontier)))
            run += len(frontier)
            ancestors, node_of = growth.pool.ancestors(), {row: node for node, row in growth.rows.items()}
            for node, seen in zip(frontier, [] if visible is None else visible, strict=visible is not None):
                assert seen.tolist() == [bool(ancestors[node, node_of[row]]) for row in range(run)]
            assert (visible is None) == (spec.width == 1)
        rows = np.stack([model([0, *growth.pool.path(node)]) for node in frontier])
        growth.grow(*best_tokens(rows, spec.branch))
        assert len(growth.frontier) <= spec.expand
    assert 0 not in growth.rows, "the root is the text's own"
    assert run <= spec.expand * (spec.depth - 1)
    return growth, growth.tree()


@given(specs(), st.integers(0, 2**32), st.sampled_from([0.0, 0.5, 1.0]))
def test_a_tree_of_any_shape_is_a_brute_force_s(spec, seed, hopeless):
    """Children without a chance are no candidates, and where there are no others the tree ends."""
    noise = {}

    def model(tokens):
        key = tuple(tokens)
        if key not in noise:
            rng = np.random.default_rng([seed, *key])
            noise[key] = rng.normal(0, 2, VOCAB).astype(np.float32)
            noise[key][1:][rng.random(VOCAB - 1) < hopeless] = -np.inf
        return noise[key].copy()

    growth, tree = grown(spec, model)
    considered, kept = brute_force(model, spec)
    assert [tuple(growth.pool.path(node)) for node in range(1, len(growth.pool))] == considered
    assert paths(tree) == kept
    assert [growth.pool.tokens[node] for node in growth.nodes] == tree.tokens
    assert [growth.pool.depths[node] for node in growth.nodes] == tree.depths


def test_equal_scores_keep_the_order_in_which_they_came():
    growth = Growth(TreeSpec("any", 3, 2, 2, 2, 3), Tree([0]))
    growth.grow(np.array([[5, 6, 7]]), np.full((1, 3), -1.0))
    growth.grow(np.array([[1, 2, 3], [4, 5, 6]]), np.zeros((2, 3)))
    assert growth.pool.tokens == [0, 5, 6, 1, 2]
    assert [growth.best(count) for count in (0, 1, 3, 9)] == [[0], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_what_has_to_come_after_a_leaf_is_as_likely_as_the_leaf():
    """It comes before less likely branches, each within the tree's nodes and the depth that is allowed."""
    runs = {(5,): [7, 8], (6,): [9], (4,): []}

    def follow(_, guess, count):
        return [*guess, *runs[tuple(guess)]][:count]

    def prolonged(nodes, depth):
        growth = Growth(TreeSpec("any", 3, 3, 3, 1, nodes), Tree([0]))
        growth.grow(np.array([[6, 5, 4]]), np.array([[-2.0, -0.2, -3.0]]))
        growth.prolong(follow, depth)
        tree = growth.tree()
        assert len(tree) <= nodes + 1
        assert [growth.pool.tokens[node] for node in growth.nodes] == tree.tokens
        assert not growth.rows, "no node is run"
        return paths(tree)

    everything = {(5,), (5, 7), (5, 7, 8), (6,), (6, 9), (4,)}
    assert prolonged(9, 9) == everything
    assert prolonged(4, 9) == everything - {(4,), (6, 9)}
    assert prolonged(9, 2) == everything - {(5, 7, 8)}
    illegal = Growth(TreeSpec.parse("topk:2,1"), Tree([0]))
    illegal.grow(np.array([[5, 6]]), np.array([[-0.2, -2.0]]))
    illegal.prolong(lambda path, guess, count: [9, 9, 9], 9)
    assert len(illegal.pool) == 3
