"""The PARD drafter draws a whole tree from one step, each level from the mask before it, and keeps no mask's row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hash_models import HashExecutor, HashModel, sequence_of
from numpy.typing import NDArray

from specbuild.runtime import SamplingParams
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.drafting.pard import PardDrafter
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.tree import Tree, TreeSpec

MASK, CHUNK = 12, 8
Path = tuple[int, ...]


def drafted(drafter: ModelDrafter, sequence: Sequence) -> Tree:
    (tree,) = drafter.propose([sequence])
    return tree


def levels(model: Callable[[Any], NDArray[np.float32]], text: list[int], depth: int) -> list[NDArray[np.float32]]:
    """What follows the text, and what follows each of its masks."""
    return [model([*text, *[MASK] * level]) for level in range(depth)]


def brute_force(logits: list[NDArray[np.float32]], spec: TreeSpec) -> set[Path]:
    """The paths of the tree: a beam over levels that know nothing of each other."""
    pool, frontier = dict[Path, float](), {(): 0.0}
    for row in logits:
        best = np.argsort(-row, kind="stable")[: spec.branch]
        shares = row[best].astype(np.float64) - np.log(np.exp(row[best].astype(np.float64)).sum())
        candidates = {
            (*path, int(token)): score + float(share)
            for path, score in frontier.items()
            for token, share in zip(best, shares, strict=True)
        }
        level = dict(sorted(candidates.items(), key=lambda item: -item[1])[: spec.width])
        pool |= level
        kept = sorted(pool, key=lambda path: -pool[path])[: spec.nodes]
        frontier = {path: level[path] for path in [path for path in level if path in kept][: spec.expand]}
    return set(sorted(pool, key=lambda path: -pool[path])[: spec.nodes])


@pytest.mark.parametrize("shape", ["chain:1", "chain:4", "topk:2,3", "topk:4,2", "best:3", "best:16"])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 33])
def test_a_tree_is_the_best_of_what_the_masks_say(shape: str, length: int) -> None:
    """However many chunks the text before it takes."""
    model, text, spec = HashModel(length), [token % 11 for token in range(length)], TreeSpec.parse(shape)
    tree = drafted(PardDrafter(HashExecutor(model), CHUNK, MASK), sequence_of(text, SamplingParams(speculation=shape)))
    assert {tuple(tree.path(node)) for node in range(1, len(tree))} == brute_force(
        levels(model, text, spec.depth), spec
    )
    assert (tree.tokens[0], len(tree)) == (text[-1], spec.nodes + 1)


def test_a_tree_costs_one_step_and_its_masks_leave_no_row_behind() -> None:
    """Nor does what was accepted: its rows are run in the next step, where the masks' were; another one starts anew."""
    model = HashModel(3)
    executor = HashExecutor(model)
    drafter = PardDrafter(executor, CHUNK, MASK)
    sequence = sequence_of([1, 2, 3], SamplingParams(max_new_tokens=60, speculation="chain:4"))
    for emitted in ([5], [6, 7], [8, 9, 10, 1, 2]):
        tree = drafted(drafter, sequence)
        assert tree.tokens[1:] == [int(row.argmax()) for row in levels(model, sequence.tokens, 4)]
        run = len(sequence.tokens)
        for token in emitted:
            sequence.emit(token, frozenset())
        drafter.commit(sequence, [0, 1][: len(emitted)])
        assert [token for _, token in executor.rows[0][:run]] == sequence.tokens[:run]
        assert executor.rows[0][run] == (-1, -1)
    (first,), *others = executor.steps
    assert (list(first.tokens), list(first.positions)) == ([1, 2, 3, *[MASK] * 3], list(range(6)))
    assert (first.start, first.committed, first.visible) == (0, 0, None)
    assert first.logits == 4, "of the root, and of each mask"
    assert [step.start for (step,) in others] == [3, 4]
    again = drafter.again()
    drafted(again, sequence)
    assert (type(again), executor.steps[3][0].start) == (PardDrafter, 0)
