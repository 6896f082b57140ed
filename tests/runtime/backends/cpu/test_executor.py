"""The ONNX Runtime executor: a tree's logits are those of its paths, lanes do not touch, a commit is plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from specbuild.runtime.backends.cpu.executor import OrtExecutor
from specbuild.runtime.backends.executor import Executor, ModelSpec, StepInput, share_rows
from specbuild.runtime.errors import BundleError, ExecutionError
from specbuild.runtime.speculation.tree import Tree

Load = Callable[[str, int], Executor]
Rows = NDArray[np.float32]
BOUND = 1e-4
PROMPT = [5, 900, 17, 2048, 33, 33, 4000, 7, 5, 900]


@pytest.fixture(scope="module", params=["target", "draft"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def single(load: Load, model: str) -> Executor:
    return load(model, 1)


@pytest.fixture(scope="module", params=[2, 4])
def batched(load: Load, model: str, request: pytest.FixtureRequest) -> Executor:
    return load(model, request.param)


def chain(tokens: Sequence[int], start: int, logits: int, slot: int = 0) -> StepInput:
    return StepInput(slot, start, start, tokens, range(start, start + len(tokens)), None, logits)


def tree_share(tree: Tree, start: int, slot: int = 0) -> StepInput:
    return StepInput(
        slot, start, start, tree.tokens, [start + depth for depth in tree.depths], tree.ancestors(), len(tree.tokens)
    )


def plain(single: Executor, tokens: Sequence[int]) -> Rows:
    """The logits after a text, one node at a time."""
    for position, token in enumerate(tokens):
        (rows,) = single.step([chain([token], position, 1)])
    result: Rows = rows[0].copy()
    single.commit(0, (), 0)
    return result


def read(executor: Executor, tokens: Sequence[int], slot: int = 0) -> None:
    executor.step([chain(tokens, 0, 1, slot)])
    executor.commit(slot, (), len(tokens))


def random_tree(seed: int, nodes: int) -> Tree:
    rng = random.Random(seed)
    tree = Tree([rng.randrange(4096)])
    while len(tree) <= nodes:
        parent, token = rng.randrange(max(0, len(tree) - 4), len(tree)), rng.randrange(4096)
        if (parent, token) not in tree.children():
            tree.add(token, parent)
    return tree


def test_a_chunk_is_its_tokens_one_at_a_time(single: Executor) -> None:
    (rows,) = single.step([chain(PROMPT, 0, len(PROMPT))])
    rows = rows.copy()
    for index in range(len(PROMPT)):
        np.testing.assert_allclose(rows[index], plain(single, PROMPT[: index + 1]), atol=BOUND)


@pytest.mark.parametrize(("seed", "nodes"), [(0, 1), (1, 6), (2, 15), (3, 20)])
def test_a_trees_logits_are_those_of_its_paths(single: Executor, seed: int, nodes: int) -> None:
    tree = random_tree(seed, nodes)
    read(single, PROMPT)
    (rows,) = single.step([tree_share(tree, len(PROMPT))])
    rows = rows.copy()
    assert rows.shape == (nodes + 1, 4096)
    for node in range(len(tree)):
        expected = plain(single, [*PROMPT, tree.tokens[0], *tree.path(node)])
        np.testing.assert_allclose(rows[node], expected, atol=BOUND)


def test_only_the_wanted_logits_come_back(single: Executor) -> None:
    (full,) = single.step([chain(PROMPT, 0, len(PROMPT))])
    full = full.copy()
    for wanted in (0, 1, 3):
        (rows,) = single.step([chain(PROMPT, 0, wanted)])
        assert rows.shape == (wanted, 4096)
        np.testing.assert_allclose(rows, full[len(PROMPT) - wanted :], atol=BOUND)


def test_a_tree_leaves_no_mask_behind(single: Executor) -> None:
    expected = plain(single, [*PROMPT, 1, 2, 3])
    tree = random_tree(4, 12)
    read(single, PROMPT)
    single.step([tree_share(tree, len(PROMPT))])
    single.commit(0, (), len(PROMPT))
    (rows,) = single.step([chain([1, 2, 3], len(PROMPT), 1)])
    np.testing.assert_allclose(rows[0], expected, atol=BOUND)


def test_a_step_that_fails_leaves_no_mask_behind(single: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    read(single, PROMPT)
    (expected,) = (rows.copy() for rows in single.step([chain([7, 8, 9, 10], len(PROMPT), 4)]))

    class Failing:
        def run_with_iobinding(self, _binding: object) -> None:
            raise RuntimeError("out of luck")

    monkeypatch.setattr(single, "_session", Failing())
    with pytest.raises(ExecutionError, match="out of luck"):
        single.step([tree_share(Tree([7, 8, 9, 10], [-1, 0, 0, 0], [0, 1, 1, 1]), len(PROMPT))])
    monkeypatch.undo()
    (rows,) = single.step([chain([7, 8, 9, 10], len(PROMPT), 4)])
    np.testing.assert_array_equal(rows, expected)
    single.commit(0, (), 0)


@pytest.mark.parametrize("seed", range(3))
def test_committing_a_branch_and_going_on_is_plain_decoding(single: Executor, seed: int) -> None:
    rng, text = random.Random(seed), list(PROMPT)
    read(single, text)
    for round_ in range(3):
        tree, start = random_tree(10 * seed + round_, 12), len(text)
        (rows,) = single.step([tree_share(tree, start)])
        rows = rows.copy()
        node = rng.randrange(1, len(tree))
        path = [n for n in range(len(tree)) if tree.ancestors()[node, n]]
        single.commit(0, [start + n for n in path], start)
        text += [tree.tokens[n] for n in path]
    (rows,) = single.step([chain([8, 9], len(text), 2)])
    rows = rows.copy()
    np.testing.assert_allclose(rows[0], plain(single, [*text, 8]), atol=BOUND)
    np.testing.assert_allclose(rows[1], plain(single, [*text, 8, 9]), atol=BOUND)


def test_levels_of_a_tree_run_one_after_another(single: Executor) -> None:
    """As the draft runs them: rows that are there but not committed are seen as the mask says."""
    read(single, PROMPT)
    base = len(PROMPT)
    first = StepInput(0, base, base, [1, 2], [base, base], np.eye(2, dtype=np.bool_), 2)
    single.step([first])
    sees = np.array([[1, 0, 1, 0, 0], [0, 1, 0, 1, 0], [1, 0, 0, 0, 1]], dtype=np.bool_)
    second = StepInput(0, base + 2, base, [3, 4, 5], [base + 1] * 3, sees, 3)
    (rows,) = single.step([second])
    rows = rows.copy()
    for row, path in zip(rows, ([1, 3], [2, 4], [1, 5]), strict=True):
        np.testing.assert_allclose(row, plain(single, [*PROMPT, *path]), atol=BOUND)


def test_lanes_are_what_each_is_alone(single: Executor, batched: Executor) -> None:
    slots = range(batched.batch_size)
    prompts = [PROMPT[: 2 + 2 * slot] for slot in slots]
    batched.step([chain(prompt, 0, int(slot != 1), slot) for slot, prompt in enumerate(prompts)])
    for slot, prompt in enumerate(prompts):
        batched.commit(slot, (), len(prompt))
    trees = [random_tree(20 + slot, 3 + 4 * slot) for slot in slots]
    order = list(slots)[::-1]  # shares come in any order, results in theirs
    results = batched.step([tree_share(trees[slot], len(prompts[slot]), slot) for slot in order])
    results = [rows.copy() for rows in results]
    for slot, rows in zip(order, results, strict=True):
        assert len(rows) == len(trees[slot])
        read(single, prompts[slot])
        (alone,) = single.step([tree_share(trees[slot], len(prompts[slot]))])
        np.testing.assert_allclose(rows, alone, atol=BOUND)
        single.commit(0, (), 0)
        batched.commit(slot, (), 0)


def test_idle_lanes_are_not_disturbed(single: Executor, batched: Executor) -> None:
    text, tree = PROMPT[:6], random_tree(30, 10)
    start, last = len(text), batched.batch_size - 1
    read(batched, text, slot=0)
    for step in range(5):  # slot 0 idles, committed
        batched.step([chain([step + 1], step, 1, last)])
        batched.commit(last, (), step + 1)
    batched.step([tree_share(tree, start, 0)])
    for step in range(5, 8):  # slot 0 idles, with rows that are not committed yet
        batched.step([chain([step + 1], step, 1, last)])
        batched.commit(last, (), step + 1)
    node = len(tree) - 1
    path = [n for n in range(len(tree)) if tree.ancestors()[node, n]]
    batched.commit(0, [start + n for n in path], start)
    text = [*text, *(tree.tokens[n] for n in path)]
    mine, other = batched.step([chain([3], len(text), 1, 0), chain([9], 8, 1, last)])
    mine, other = mine.copy(), other.copy()
    np.testing.assert_allclose(mine[0], plain(single, [*text, 3]), atol=BOUND)
    np.testing.assert_allclose(other[0], plain(single, range(1, 10)), atol=BOUND)
    for slot in (0, last):
        batched.commit(slot, (), 0)


def test_rows_of_another_lane_go_on_as_ones_own(single: Executor, batched: Executor) -> None:
    """Also after a step in which the lane that has them was idle."""
    read(batched, PROMPT, 1)
    share_rows(batched, 0, 1, 7)
    yours = batched.step([chain([9], len(PROMPT), 1, 1)])[0].copy()
    mine = batched.step([chain([1, 2, 3], 7, 1, 0)])[0].copy()
    for slot in (0, 1):
        batched.commit(slot, (), 0)
    np.testing.assert_allclose(mine[0], plain(single, [*PROMPT[:7], 1, 2, 3]), atol=BOUND)
    np.testing.assert_allclose(yours[0], plain(single, [*PROMPT, 9]), atol=BOUND)


def test_the_last_rows_of_the_cache_can_be_used(single: Executor) -> None:
    most, capacity = single.spec.max_nodes, single.spec.capacity
    rng = random.Random(5)
    text = [rng.randrange(4096) for _ in range(capacity - most)]
    for start in range(0, len(text), most):
        single.step([chain(text[start : start + most], start, 0)])
    single.commit(0, (), len(text))
    tree = random_tree(6, most - 1)
    (rows,) = single.step([tree_share(tree, len(text))])
    assert rows.shape == (most, 4096)
    assert np.isfinite(rows).all()
    single.commit(0, (), 0)


def test_too_many_nodes_are_refused(single: Executor, batched: Executor) -> None:
    most, capacity = single.spec.max_nodes, single.spec.capacity
    expected = plain(single, PROMPT)
    for executor in (single, batched):
        for share in (
            chain([1] * (most + 1), 0, 1),
            chain([1] * 2, capacity - 1, 1),
            chain([1], capacity, 1),
        ):
            with pytest.raises(ExecutionError) as caught:
                executor.step([share])
            assert "\n" not in str(caught.value)
        (rows,) = executor.step([chain(PROMPT, 0, 1)])  # and nothing is broken
        np.testing.assert_allclose(rows[0], expected, atol=BOUND)
        executor.commit(0, (), 0)


def test_time_and_bytes_are_counted(single: Executor) -> None:
    before = single.seconds
    single.step([chain(PROMPT, 0, 1)])
    assert before < single.seconds < before + 10
    spec = single.spec
    assert single.cache_bytes == 4 * 2 * spec.layers * spec.kv_heads * spec.capacity * spec.head_dim


@pytest.mark.parametrize("content", [b"", b"not a model"])
def test_a_file_that_is_no_model_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.onnx").write_bytes(content)
    with pytest.raises(BundleError) as caught:
        OrtExecutor(tmp_path / "x.onnx", ModelSpec("target", 1, 1, 1, 1, 1, 1), 1, 1)
    assert "\n" not in str(caught.value)
