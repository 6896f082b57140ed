"""The PARD drafter draws a whole tree from one step, each level from the mask before it, and keeps no mask's row."""

import numpy as np
import pytest
from hash_models import HashExecutor, HashModel, growths, sequence_of

from specbuild.runtime import SamplingParams
from specbuild.runtime.drafting.pard import PardDrafter
from specbuild.runtime.speculation.tree import Tree, TreeSpec
from specbuild.runtime.speculation.tree_growth import Growth, best_tokens

MASK, CHUNK = 12, 8


def levels(model, text, depth):
    """What follows the text, and what follows each of its masks."""
    return [model([*text, *[MASK] * level]) for level in range(depth)]


@pytest.mark.parametrize("shape", ["chain:1", "chain:4", "topk:2,3", "topk:4,2", "best:3", "best:16"])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 33])
def test_a_tree_is_the_best_of_what_the_masks_say(shape, length):
    """However many chunks the text before it takes."""
    model, text, spec = HashModel(length), [token % 11 for token in range(length)], TreeSpec.parse(shape)
    sequence = sequence_of(text, SamplingParams(speculation=shape))
    (growth,) = growths(PardDrafter(HashExecutor(model), CHUNK, MASK), sequence)
    assert growth.tree() == wanted(model, text, spec)


def test_a_tree_costs_one_step_and_its_masks_leave_no_row_behind():
    """Nor does what was accepted: its rows are run in the next step, where the masks' were; another one starts anew."""
    model = HashModel(3)
    executor = HashExecutor(model)
    drafter = PardDrafter(executor, CHUNK, MASK)
    sequence = sequence_of([1, 2, 3], SamplingParams(max_new_tokens=60, speculation="chain:4"))
    for emitted in ([5], [6, 7], [8, 9, 10, 1, 2]):
        (growth,) = growths(drafter, sequence)
        assert growth.tree().tokens[1:] == [int(row.argmax()) for row in levels(model, sequence.tokens, 4)]
        run = len(sequence.tokens)
        for token in emitted:
            sequence.emit(token, frozenset())
        drafter.commit(sequence.slot, growth, [0, 1][: len(emitted)])
        assert [token for _, token in executor.rows[0][:run]] == sequence.tokens[:run]
        assert executor.rows[0][run] == (-1, -1)
    (first,), *others = executor.steps
    assert (list(first.tokens), list(first.positions)) == ([1, 2, 3, *[MASK] * 3], list(range(6)))
    assert (first.start, first.committed, first.visible) == (0, 0, None)
    assert first.logits == 4, "of the root, and of each mask"
    assert [step.start for (step,) in others] == [3, 4]
    again = drafter.again()
    growths(again, sequence)
    assert (type(again), executor.steps[3][0].start) == (PardDrafter, 0)


def wanted(model, text, spec):
    """The best tree over levels that know nothing of each other."""
    growth = Growth(spec, Tree(text[-1:]))
    for row in levels(model, text, spec.depth):
        if not growth.done:
            growth.grow(*best_tokens(np.stack([row] * len(growth.frontier)), spec.branch))
    return growth.tree()
