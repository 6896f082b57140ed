"""The ONNX Runtime executor: a tree's logits are those of its paths, slots do not touch, a commit is plain decoding."""

import random

import numpy as np
import pytest
from executor_contract import chain, check_levels, check_trees_and_commits, grown

from specbuild.runtime.backends.cpu.executor import OrtExecutor
from specbuild.runtime.backends.executor import ModelSpec, share_rows
from specbuild.runtime.errors import BundleError, ExecutionError
from specbuild.runtime.speculation.tree import Tree


@pytest.fixture(scope="module")
def single(load):
    return load("target", 1)


@pytest.fixture(scope="module")
def batched(load):
    return load("target", 4)


BOUND = 1e-4
PROMPT = [5, 900, 17, 2048, 33, 33, 4000, 7, 5, 900]


def plain(single, tokens):
    """The logits after a text, one node at a time."""
    for position, token in enumerate(tokens):
        (rows,) = single.step([chain(0, [token], position, 1)])
    result = rows[0].copy()
    single.commit(0, (), 0)
    return result


def read(executor, tokens, slot=0):
    executor.step([chain(slot, tokens, 0, 1)])
    executor.commit(slot, (), len(tokens))


def random_tree(seed, nodes):
    rng, tree = random.Random(seed), Tree([0])
    for token in range(1, nodes + 1):
        tree.add(token, rng.randrange(max(0, len(tree) - 4), len(tree)))
    return tree


def test_a_step_that_fails_leaves_no_mask_behind(single):
    read(single, PROMPT)
    (expected,) = (rows.copy() for rows in single.step([chain(0, [7, 8, 9, 10], len(PROMPT), 4)]))
    with pytest.raises(ExecutionError, match="out of range"):
        single.step([grown(0, Tree([7, 8, 9, 5000], [-1, 0, 0, 0], [0, 1, 1, 1]), len(PROMPT))])
    (rows,) = single.step([chain(0, [7, 8, 9, 10], len(PROMPT), 4)])
    np.testing.assert_array_equal(rows, expected)
    single.commit(0, (), 0)


def test_rows_of_another_slot_go_on_as_ones_own(single, batched):
    """Also after a step in which the slot that has them was idle."""
    read(batched, PROMPT, 1)
    share_rows(batched, 0, 1, 7)
    yours = batched.step([chain(1, [9], len(PROMPT), 1)])[0].copy()
    mine = batched.step([chain(0, [1, 2, 3], 7, 1)])[0].copy()
    for slot in (0, 1):
        batched.commit(slot, (), 0)
    np.testing.assert_allclose(mine[0], plain(single, [*PROMPT[:7], 1, 2, 3]), atol=BOUND)
    np.testing.assert_allclose(yours[0], plain(single, [*PROMPT, 9]), atol=BOUND)


def test_the_last_rows_of_the_cache_can_be_used(single):
    most, free = single.spec.max_nodes, single.spec.capacity - single.spec.max_nodes
    for start in range(0, free, most):
        single.step([chain(0, [5] * min(most, free - start), start, 0)])
    single.commit(0, (), free)
    (rows,) = single.step([grown(0, random_tree(6, most - 1), free)])
    assert rows.shape == (most, 4096)
    assert np.isfinite(rows).all()
    single.commit(0, (), 0)


def test_too_many_nodes_are_refused(single):
    """And nothing is broken."""
    most, capacity, expected = single.spec.max_nodes, single.spec.capacity, plain(single, PROMPT)
    for count, start in ((most + 1, 0), (2, capacity - 1), (1, capacity)):
        with pytest.raises(ExecutionError, match=f"^{count} nodes from row {start} on do not fit the target$"):
            single.step([chain(0, [1] * count, start, 1)])
    (rows,) = single.step([chain(0, PROMPT, 0, 1)])
    np.testing.assert_allclose(rows[0], expected, atol=BOUND)
    single.commit(0, (), 0)


def test_time_and_bytes_are_counted(single):
    before = single.seconds
    single.step([chain(0, PROMPT, 0, 1)])
    assert before < single.seconds < before + 10
    spec = single.spec
    assert single.cache_bytes == 4 * 2 * spec.layers * spec.kv_heads * spec.capacity * spec.head_dim


@pytest.mark.parametrize("content", [b"", b"not a model"])
def test_a_file_that_is_no_model_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "x.onnx").write_bytes(content)
    with pytest.raises(BundleError):
        OrtExecutor(tmp_path / "x.onnx", ModelSpec("target", 1, 1, 1, 1, 1, 1), 1, 1)


def test_trees_and_commits_are_plain_decoding(single, batched):
    prompts = [PROMPT[: 2 + 2 * slot] for slot in range(batched.batch_size)]
    for executor, texts in ((batched, prompts), (single, [PROMPT])):
        check_trees_and_commits(executor, texts, lambda text: plain(single, text), {"atol": BOUND})


def test_levels_see_their_branch(single, batched):
    check_levels(batched, 1, PROMPT, lambda text: plain(single, text), {"atol": BOUND})
