"""What choosing, walking, committing, masking and growing mean, in plain NumPy; and random trees to compare on.

Processors, cut-offs, walk and growth are the runtime's own (sampling.py, accept.py, draft.py), which run in NumPy.
"""

from itertools import islice

import numpy as np

from specbuild.runtime.sampling.sampler import Sampler
from specbuild.runtime.speculation.tree import Tree


def sampler(params, seed, vocab, prompt, output):
    """The runtime's sampler of a sequence that has emitted `output`."""
    made = Sampler(params, seed, prompt, vocab)
    for token in output:
        made.emit(token, 0)
    return made


def best(made, logits, position, path, count):
    """The `count` best tokens and scores of a row, filled up with −1 and −∞; −1 alone where the row is unsound."""
    row = logits.astype(np.float32)
    found = [] if np.isnan(row).any() else list(islice(made.ranked(row, position, path), count))
    if found and not np.isfinite(found[0][1]):
        found = []
    missing = count - len(found)
    return [t for t, _ in found] + [-1] * missing, [s for _, s in found] + [-np.inf] * missing


def mask(tree, committed, offset, count, nodes, capacity, window):
    """`bool[N, S]`: what nodes offset … offset + count − 1 of a tree see; padding sees row 0."""
    seen = np.zeros((nodes, capacity), dtype=bool)
    seen[count:, 0] = True
    ancestors = tree.ancestors()
    positions = np.concatenate((np.arange(committed), committed + np.array(tree.depths)))
    for i in range(count):
        node = offset + i
        visible = np.concatenate((np.ones(committed, dtype=bool), ancestors[node]))
        if window:
            visible &= positions[committed + node] - positions < window
        seen[i, : len(visible)] = visible
    return seen


def random_tree(rng, size, vocab, root=0):
    """A tree of `size` nodes of any shape, whose siblings differ."""
    tree, known = Tree([root]), set[tuple[int, int]]()
    reach = int(rng.integers(1, size + 1))  # small: deep trees; large: wide ones
    while len(tree) < size:
        parent, token = int(rng.integers(max(0, len(tree) - reach), len(tree))), int(rng.integers(vocab))
        if (parent, token) not in known:
            known.add((parent, token))
            tree.add(token, parent)
    return tree
