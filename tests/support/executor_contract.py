"""What every executor has to do: logits are those of each node's own text, whatever else stands in the cache."""

import numpy as np
from small_models import branching

from specbuild.runtime.backends.executor import StepInput


def chain(slot, tokens, start, logits):
    """Tokens one after the other, all before them being committed."""
    return StepInput(slot, start, start, tokens, range(start, start + len(tokens)), None, logits)


def grown(slot, tree, start):
    """A tree's nodes, its root being the first that is not committed."""
    return StepInput(slot, start, start, tree.tokens, [start + d for d in tree.depths], tree.ancestors(), len(tree))


def check_trees_and_commits(made, prompts, last, bound):
    """Prompts, trees over them, a branch of each committed, and trees over that; one slot of several has no trees.

    Inputs come in another order than slots, and rows that are not committed lie there while another slot is read.
    """
    texts = [list(prompt) for prompt in prompts]
    order = list(range(len(texts)))[::-1]
    for slot, rows in zip(order, made.step([chain(slot, texts[slot], 0, 1) for slot in order]), strict=True):
        np.testing.assert_allclose(rows[-1], last(texts[slot]), **bound)
    for slot, text in enumerate(texts):
        made.commit(slot, (), len(text))
    for seed in range(2):
        trees = {slot: branching(10 * seed + slot, 9 - 2 * slot) for slot in order[1:] or order}
        inputs = [grown(slot, tree, len(texts[slot])) for slot, tree in trees.items()]
        results = [rows.copy() for rows in made.step(inputs)]
        for (slot, tree), rows in zip(trees.items(), results, strict=True):
            for node in range(len(tree)):
                np.testing.assert_allclose(rows[node], last([*texts[slot], tree.tokens[0], *tree.path(node)]), **bound)
        if order[0] not in trees:
            check_next(made, order[0], texts[-1], last, bound)
        for slot, tree in trees.items():
            path = np.flatnonzero(tree.ancestors()[-1]).tolist()
            made.commit(slot, [len(texts[slot]) + node for node in path], len(texts[slot]))
            texts[slot] += [tree.tokens[node] for node in path]
    for slot in order:
        check_next(made, slot, texts[slot], last, bound)
        made.commit(slot, (), 0)


def check_next(made, slot, text, last, bound):
    """Read and commit one token more."""
    (rows,) = made.step([chain(slot, [3], len(text), 1)])
    text.append(3)
    np.testing.assert_allclose(rows[0], last(text), **bound)
    made.commit(slot, (), len(text))


def check_levels(made, slot, text, last, bound):
    """As a draft runs them: rows that are there, but not committed, are seen as the mask says."""
    made.step([chain(slot, text, 0, 1)])
    made.commit(slot, (), len(text))
    base = len(text)
    made.step([StepInput(slot, base, base, [1, 2], [base] * 2, np.eye(2, dtype=np.bool_), 2)])
    sees = np.array([[1, 0, 1, 0, 0], [0, 1, 0, 1, 0], [1, 0, 0, 0, 1]], dtype=np.bool_)
    (rows,) = made.step([StepInput(slot, base + 2, base, [3, 4, 5], [base + 1] * 3, sees, 3)])
    for row, path in zip(rows.copy(), ([1, 3], [2, 4], [1, 5]), strict=True):
        np.testing.assert_allclose(row, last([*text, *path]), **bound)
    made.commit(slot, (), 0)
