"""The growing tree keeps what a brute-force search would keep, level by level, and says whose rows each node sees."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specbuild.runtime.speculation.policy import Policy, SequencePolicy
from specbuild.runtime.speculation.timings import TimingTable
from specbuild.runtime.speculation.tree import BEST_BRANCH, Tree, TreeSpec
from specbuild.runtime.speculation.tree_growth import Growth, best_tokens, likelihoods

VOCAB = 12
Path = tuple[int, ...]


def log_share(scores: NDArray[np.float32], count: int) -> NDArray[np.float64]:
    """log softmax among the `count` best scores, −inf for all others."""
    wide = scores.astype(np.float64)
    wide[np.argsort(-wide, kind="stable")[count:]] = -np.inf
    with np.errstate(divide="ignore"):
        return wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, VOCAB))
def test_best_tokens_against_a_sort(seed: int, rows: int, count: int) -> None:
    scores = np.random.default_rng(seed).normal(0, 3, (rows, VOCAB)).astype(np.float32)
    tokens, likelihoods = best_tokens(scores.copy(), count)
    expected = np.stack([log_share(row, count) for row in scores])
    order = np.argsort(-expected, axis=1)[:, :count]
    assert np.array_equal(tokens, order)
    if count > 1:
        np.testing.assert_allclose(likelihoods, np.take_along_axis(expected, order, axis=1), atol=1e-5)


def test_best_tokens_leaves_out_what_a_cut_off_excluded() -> None:
    scores = np.full((1, 5), -np.inf, dtype=np.float32)
    scores[0, [3, 1]] = [1.0, 0.0]
    tokens, likelihoods = best_tokens(scores, 4)
    assert tokens[0, :2].tolist() == [3, 1]
    assert np.isneginf(likelihoods[0, 2:]).all()


def grown(model: Callable[[Any], NDArray[np.float32]], text: str) -> tuple[Growth, Tree]:
    growth = Growth(TreeSpec.parse(text), Tree([0]))
    while True:
        growth.grow(
            *best_tokens(np.stack([model([0, *growth.pool.path(n)]) for n in growth.frontier]), growth.spec.branch)
        )
        if growth.done:
            return growth, growth.tree()
        growth.place()


def paths(tree: Tree) -> set[Path]:
    return {tuple(tree.path(node)) for node in range(1, len(tree))}


def most_likely(model: Callable[[Any], NDArray[np.float32]], count: int) -> set[Path]:
    """The most likely paths of any length, by a best-first search over every child of every node."""
    heap: list[tuple[float, Path]] = [(0.0, ())]
    found: set[Path] = set()
    while len(found) <= count:
        cost, path = heapq.heappop(heap)
        found.add(path)
        for token, likelihood in enumerate(log_share(model([0, *path]), min(count, BEST_BRANCH))):
            heapq.heappush(heap, (cost - float(likelihood), (*path, token)))
    return found - {()}


def beam(model: Callable[[Any], NDArray[np.float32]], width: int, depth: int) -> set[Path]:
    """The `width` most likely children of each level's `width` survivors."""
    level: dict[Path, float] = {(): 0.0}
    found: set[Path] = set()
    for _ in range(depth):
        candidates = {
            (*path, token): score + float(likelihood)
            for path, score in level.items()
            for token, likelihood in enumerate(log_share(model([0, *path]), width))
        }
        level = dict(islice(sorted(candidates.items(), key=lambda item: -item[1]), width))
        found |= set(level)
    return found


@pytest.mark.parametrize("nodes", range(2, 9))
@pytest.mark.parametrize("seed", range(8))
def test_best_first_trees_are_the_best(hash_model: Any, nodes: int, seed: int) -> None:
    model = hash_model(seed)
    growth, tree = grown(model, f"best:{nodes}")
    assert paths(tree) == most_likely(model, nodes)
    assert len(tree) == nodes + 1
    assert all(tree.parents[node] < node for node in range(len(tree)))
    assert [growth.pool.tokens[node] for node in growth.kept] == tree.tokens


@pytest.mark.parametrize("shape", [(1, 3), (2, 3), (4, 4), (3, 1), (2, 6)])
@pytest.mark.parametrize("seed", range(6))
def test_topk_trees_are_a_beam(hash_model: Any, shape: tuple[int, int], seed: int) -> None:
    model, (width, depth) = hash_model(seed), shape
    _, tree = grown(model, f"topk:{width},{depth}")
    assert paths(tree) == beam(model, width, depth)
    assert [tree.depths.count(level) for level in range(1, depth + 1)] == [width] * depth


@pytest.mark.parametrize("text", ["chain:1", "chain:5", "topk:1,5", "best:1"])
def test_a_chain_is_the_greedy_path(hash_model: Any, text: str) -> None:
    model, tokens = hash_model(3), [0]
    _, tree = grown(model, text)
    while len(tokens) < TreeSpec.parse(text).nodes + 1:
        tokens.append(int(model(tokens).argmax()))
    assert tree == Tree.chain(tokens)


@pytest.mark.parametrize("text", ["best:16", "best:40"])
@pytest.mark.parametrize("seed", range(4))
def test_larger_best_first_trees_keep_the_best_of_what_was_considered(hash_model: Any, text: str, seed: int) -> None:
    model = hash_model(seed)
    growth, tree = grown(model, text)
    spec = growth.spec
    assert len(tree) == spec.nodes + 1
    kept, scores = set(growth.kept), growth.scores
    dropped = [scores[node] for node in range(len(growth.pool)) if node not in kept]
    assert all(growth.pool.parents[node] in kept for node in kept if node)
    assert min(scores[node] for node in kept) >= max(dropped, default=-np.inf)
    for node in range(1, len(growth.pool)):
        path = growth.pool.path(node)
        expected = sum(log_share(model([0, *path[:i]]), spec.branch)[path[i]] for i in range(len(path)))
        assert scores[node] == pytest.approx(expected, abs=1e-4)


def test_rows_say_who_sees_whom(hash_model: Any) -> None:
    model, growth = hash_model(1), Growth(TreeSpec.parse("topk:3,4"), Tree([0]))
    growth.grow(*best_tokens(model([0])[None].copy(), growth.spec.branch))
    while not growth.done:
        frontier, first = list(growth.frontier), growth.run
        visible = growth.place()
        assert visible is not None
        assert visible.shape == (len(frontier), first + len(frontier))
        ancestors = growth.pool.ancestors()
        node_of = {row: node for node, row in enumerate(growth.rows) if row >= 0}
        for index, node in enumerate(frontier):
            assert growth.rows[node] == first + index
            assert visible[index].tolist() == [bool(ancestors[node, node_of[row]]) for row in range(growth.run)]
        growth.grow(*best_tokens(np.stack([model([0, *growth.pool.path(n)]) for n in frontier]), growth.spec.branch))


@st.composite
def specs(draw: st.DrawFn) -> TreeSpec:
    """Shapes that the grammar has no word for, too."""
    branch, width, depth = (draw(st.integers(1, most)) for most in (4, 6, 5))
    expand, nodes = draw(st.integers(1, width)), draw(st.integers(1, 20))
    return TreeSpec("any", branch, width, expand, depth, nodes)


def brute_force(model: Callable[[Any], NDArray[np.float32]], spec: TreeSpec) -> tuple[list[Path], set[Path]]:
    """Every candidate that a level keeps, in order, and those of them that make the tree; by lists and sorting."""
    scores: dict[Path, float] = {(): 0.0}
    frontier: list[Path] = [()]

    def best() -> set[Path]:
        return set(sorted([path for path in scores if path], key=lambda path: -scores[path])[: spec.nodes])

    for _ in range(spec.depth):
        candidates = []
        for path in frontier:
            shares = log_share(model([0, *path]), spec.branch)
            children = np.argsort(-shares, kind="stable")[: spec.branch].tolist()
            candidates += [((*path, token), scores[path] + float(shares[token])) for token in children]
        level = dict(sorted(candidates, key=lambda item: -item[1])[: spec.width])
        scores |= level
        frontier = [path for path in level if path in best()][: spec.expand]
        if not frontier:
            break
    return list(scores)[1:], best()


@settings(deadline=None)
@given(specs(), st.integers(0, 2**32))
def test_a_tree_of_any_shape_is_a_brute_force_s(spec: TreeSpec, seed: int) -> None:
    noise: dict[Path, NDArray[np.float32]] = {}

    def model(tokens: Any) -> NDArray[np.float32]:
        key = tuple(tokens)
        if key not in noise:
            noise[key] = np.random.default_rng([seed, *key]).normal(0, 2, VOCAB).astype(np.float32)
        return noise[key].copy()

    growth = Growth(spec, Tree([0]))
    levels = 0
    while not levels or not growth.done:
        rows = np.stack([model([0, *growth.pool.path(node)]) for node in growth.frontier])
        growth.grow(*best_tokens(rows, spec.branch))
        levels += 1
        assert growth.depth == levels <= spec.depth
        assert len(growth.frontier) <= spec.expand
    tree = growth.tree()
    considered, kept = brute_force(model, spec)
    assert [tuple(growth.pool.path(node)) for node in range(1, len(growth.pool))] == considered
    assert paths(tree) == kept
    trunk = tree.trunk
    assert growth.kept[trunk:] == sorted(growth.kept[trunk:])
    for node in range(
        trunk
    ):  # no child of the trunk is likelier than the one that lies behind it, and its end has none
        children = [growth.scores[growth.kept[n]] for n, parent in enumerate(tree.parents) if parent == node]
        assert growth.scores[growth.kept[node + 1]] == max(children) if node + 1 < trunk else not children
    assert [growth.pool.tokens[node] for node in growth.kept] == tree.tokens
    assert [growth.pool.depths[node] for node in growth.kept] == tree.depths


@settings(deadline=None)
@given(specs(), st.integers(0, 2**32))
def test_rows_are_given_once_and_one_after_another(spec: TreeSpec, seed: int) -> None:
    rng, growth, run = np.random.default_rng(seed), Growth(spec, Tree([0])), 0
    growth.grow(*best_tokens(rng.normal(0, 2, (1, VOCAB)).astype(np.float32), spec.branch))
    while not growth.done:
        placed = list(growth.frontier)
        visible = growth.place()
        assert [growth.rows[node] for node in placed] == list(range(run, run + len(placed)))
        run += len(placed)
        assert growth.run == run == sum(row >= 0 for row in growth.rows)
        assert (visible is None) == (spec.width == 1)
        growth.grow(*best_tokens(rng.normal(0, 2, (len(placed), VOCAB)).astype(np.float32), spec.branch))
    assert growth.rows[0] == -1, "the root is the text's own"
    assert run <= spec.expand * (spec.depth - 1)


@settings(deadline=None)
@given(specs(), st.integers(0, 2**32))
def test_the_likeliest_leaf_has_the_best_score_of_all_leaves(spec: TreeSpec, seed: int) -> None:
    rng, growth = np.random.default_rng(seed), Growth(spec, Tree([0]))
    while not growth.done:
        rows = rng.normal(0, 2, (len(growth.frontier), VOCAB)).astype(np.float32)
        growth.grow(*best_tokens(rows, spec.branch))
    tree, path = growth.tree(), growth.likeliest()
    leaves = [node for node in range(len(tree)) if node not in tree.parents]
    assert growth.scores[path[-1]] == max(growth.scores[growth.kept[leaf]] for leaf in leaves)
    assert growth.kept.index(path[-1]) in leaves
    assert growth.pool.path(path[-1]) == [growth.pool.tokens[node] for node in path]
    assert [growth.pool.depths[node] for node in path] == list(range(1, len(path) + 1))


def test_children_without_a_chance_are_no_candidates() -> None:
    growth = Growth(TreeSpec.parse("topk:3,2"), Tree([0]))
    growth.grow(np.array([[5, 6, 7]]), np.array([[-0.1, -np.inf, -2.0]]))
    assert growth.pool.tokens == [0, 5, 7]
    assert growth.frontier == [1, 2]
    growth.grow(np.zeros((2, 3), dtype=np.int64), np.full((2, 3), -np.inf))
    assert (growth.frontier, growth.done, growth.depth) == ([], True, 2)
    assert growth.tree() == Tree([0, 5, 7], [-1, 0, 0], [0, 1, 1])


def test_a_root_that_nothing_follows_is_a_tree_of_one() -> None:
    growth = Growth(TreeSpec.parse("best:4"), Tree([3]))
    assert not growth.done
    growth.grow(np.zeros((1, 4), dtype=np.int64), np.full((1, 4), -np.inf))
    assert growth.done
    assert growth.tree() == Tree([3])
    assert (growth.kept, growth.likeliest()) == ([0], [])


def test_a_chain_grows_by_its_only_candidate_and_needs_no_mask() -> None:
    growth = Growth(TreeSpec.parse("chain:2"), Tree([3]))
    growth.grow(np.array([[4]]), np.zeros((1, 1)))
    assert growth.place() is None
    growth.grow(np.array([[5]]), np.zeros((1, 1)))
    assert (growth.done, growth.tree()) == (True, Tree.chain([3, 4, 5]))
    assert (growth.rows, growth.likeliest()) == ([-1, 0, -1], [1, 2])


def test_equal_scores_keep_the_order_in_which_they_came() -> None:
    growth = Growth(TreeSpec("any", 3, 2, 2, 2, 3), Tree([0]))
    growth.grow(np.array([[5, 6, 7]]), np.full((1, 3), -1.0))
    assert growth.pool.tokens == [0, 5, 6]
    growth.grow(np.array([[1, 2, 3], [4, 5, 6]]), np.zeros((2, 3)))
    assert growth.pool.tokens == [0, 5, 6, 1, 2]
    assert growth.best() == [0, 1, 2, 3], "an ancestor goes before its equal descendants"
    assert growth.best(1) == [0, 1]
    assert growth.best(0) == [0]
    assert growth.best(9) == [0, 1, 2, 3, 4]
    wide = Growth(TreeSpec("any", 200, 150, 1, 1, 100), Tree([0]))
    wide.grow(np.arange(200)[None], np.full((1, 200), -1.0))
    assert wide.pool.tokens == [0, *range(150)]
    assert wide.tree().tokens == [0, *range(100)]


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-50, 50), min_size=3, max_size=3), min_size=1, max_size=4))
def test_likelihoods_are_logarithms_of_shares_that_sum_to_one(rows: list[list[float]]) -> None:
    scores = -np.sort(-np.array(rows), axis=1)
    found = likelihoods(scores)
    np.testing.assert_allclose(np.exp(found).sum(axis=1), 1, rtol=1e-12)
    np.testing.assert_allclose(found - found[:, :1], scores - scores[:, :1], atol=1e-9)
    np.testing.assert_allclose(likelihoods(scores + 7), found, atol=1e-9)


def test_likelihoods_of_rows_that_are_cut_off_are_no_numbers_gone_wrong() -> None:
    with np.errstate(all="raise", divide="ignore"):
        found = likelihoods(np.array([[2.0, -np.inf], [-np.inf, -np.inf], [3.0, 3.0]]))
    assert found[0].tolist() == [0.0, -np.inf]
    assert np.isneginf(found[1]).all()
    np.testing.assert_allclose(found[2], np.log(0.5))


@pytest.fixture
def policy() -> SequencePolicy:
    """One that has just found the model worth a tree, on a machine where drafting is cheap."""
    times = {"verify": [[1, 8.0], [64, 80.0]], "draft": [[1, 0.6], [64, 4.0]]}
    times |= {"plain": 0.1, "round": 0.2, "level": 0.1}
    chances = {
        "likely": [-8.0, -1.0, 0.0],
        "chance": [0.01, 0.4, 0.95],
        "step": 0.75,
        "reach": [0, 0.75, 1.3, 1.7, 2.0],
        "lookup": [0.0, 0.3],
    }
    record = {"schema": 2, "machine": {}, "widest": "best:16", "times": {"1": times}}
    table = TimingTable.of(record | {"chances": {"greedy": chances, "sampled": chances}}, 64)
    made = Policy(table, drafts=True).for_request(0.0)
    assert made.choose(1, 0, 40).kind == "model"
    return made


@pytest.mark.parametrize("seed", range(4))
def test_a_policy_says_which_nodes_are_expanded_and_which_verified(policy: SequencePolicy, seed: int) -> None:
    rng, growth = np.random.default_rng(seed), Growth(TreeSpec.parse("best:16"), Tree([0]), policy=policy)
    narrowed = 0
    while not growth.done:
        rows, nodes = rng.normal(0, 2, (len(growth.frontier), VOCAB)).astype(np.float32), len(growth.pool)
        tokens, likely = best_tokens(rows, growth.spec.branch)
        growth.grow(tokens, policy.log_chances(likely))
        wanted = [node for node in range(nodes, len(growth.pool)) if node in growth.best()][: growth.spec.expand]
        if growth.depth < growth.spec.depth:
            kept = policy.expands([growth.scores[node] for node in wanted])
            assert growth.frontier == wanted[:kept]
            narrowed += kept < len(wanted)
    scores = sorted(growth.scores[1:], reverse=True)[: growth.spec.nodes]
    tree = growth.tree()
    assert len(tree) - 1 == policy.verifies(scores)
    assert 0 < len(tree) - 1 < growth.spec.nodes, "on this machine sixteen are too many"
    assert narrowed > 0
    assert len(policy.below) == len(tree)
    leaves = [node for node in range(len(tree)) if node not in tree.parents]
    assert {policy.below[leaf] for leaf in leaves} == {0.0}
    assert all(policy.below[node] > 0 for node in range(len(tree)) if node not in leaves)


def test_what_has_to_come_after_a_leaf_is_as_likely_as_the_leaf() -> None:
    """It comes before less likely branches, each within the tree's nodes and the depth that is allowed."""
    runs = {(5,): [7, 8], (6,): [9], (4,): []}

    def follow(_: Any, guess: Any, count: int) -> list[int]:
        return [*guess, *runs[tuple(guess)]][:count]

    def prolonged(nodes: int, depth: int) -> set[Path]:
        growth = Growth(TreeSpec("any", 3, 3, 3, 1, nodes), Tree([0]))
        growth.grow(np.array([[6, 5, 4]]), np.array([[-2.0, -0.2, -3.0]]))
        growth.prolong(follow, depth)
        tree = growth.tree()
        assert len(tree) <= nodes + 1
        assert [growth.pool.tokens[node] for node in growth.kept] == tree.tokens
        assert tree.path(tree.trunk - 1) == [5, 7, 8][: tree.trunk - 1]
        assert all(growth.rows[node] == -1 for node in growth.forced)
        assert tree.trunk == len(growth.likeliest()) + 1
        return paths(tree)

    everything = {(5,), (5, 7), (5, 7, 8), (6,), (6, 9), (4,)}
    assert prolonged(9, 9) == prolonged(6, 9) == everything
    assert prolonged(5, 9) == everything - {(4,)}
    assert prolonged(4, 9) == everything - {(4,), (6, 9)}
    assert prolonged(3, 9) == {(5,), (5, 7), (5, 7, 8)}
    assert prolonged(9, 2) == everything - {(5, 7, 8)}
    assert prolonged(9, 1) == {(5,), (6,), (4,)}


def test_nothing_goes_on_after_a_leaf_that_is_not_legal() -> None:
    growth = Growth(TreeSpec.parse("topk:2,1"), Tree([0]))
    growth.grow(np.array([[5, 6]]), np.array([[-0.2, -2.0]]))
    growth.prolong(lambda path, guess, count: [9, 9, 9], 9)
    assert (len(growth.pool), growth.forced) == (3, set())
