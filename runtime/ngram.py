"""Prompt lookup: drafts what followed the last tokens' earlier occurrences; needs no model.

Source: Saxena, "Prompt Lookup Decoding" (2023); the n-gram drafter of vLLM and transformers.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from .sequence import Sequence
from .tree import Tree, TreeSpec

LONGEST, SHORTEST = 4, 1  # tokens that must match


class NgramDrafter:
    """Merges the continuations of the most recent matches, longest n-gram first, into a tree of the asked shape."""

    seconds = 0.0
    cache_bytes = 0

    def propose(self, sequences: Seq[Sequence]) -> list[Tree]:
        """A tree per sequence; the root alone where nothing matches."""
        return [lookup(s.tokens, s.tree) if s.tree else Tree([s.tokens[-1]]) for s in sequences]

    def commit(self, sequence: Sequence, path: Seq[int]) -> None:
        """Nothing to keep: the text is the state."""

    def release(self, slot: int) -> None:
        """Nothing to forget."""

    def close(self) -> None:
        """Nothing to free."""


def lookup(tokens: Seq[int], spec: TreeSpec) -> Tree:
    """The tree of continuations: at most `branch` matches, `width` nodes a level, `depth` levels, `nodes` in all."""
    history = np.asarray(tokens, dtype=np.int64)
    tree, children, level = Tree([tokens[-1]]), {}, [1] + [0] * spec.depth
    branches = 0
    for start in matches(history, spec.branch):
        node, grown = 0, False
        for token in tokens[start : start + spec.depth]:
            child = children.get((node, token))
            if child is None:
                depth = tree.depths[node] + 1
                if len(tree) > spec.nodes or level[depth] >= spec.width:
                    break
                child = children[node, token] = tree.add(token, node)
                level[depth] += 1
                grown = True
            node = child
        branches += grown
        if branches == spec.branch:
            break
    return tree


def matches(history: np.ndarray, count: int) -> list[int]:
    """Where earlier occurrences of the last n tokens end, longest n first, the most recent first; no repeats."""
    found: list[int] = []
    for n in range(min(LONGEST, len(history) - 1), SHORTEST - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(history[:-1], n)
        ends = np.flatnonzero((windows == history[-n:]).all(axis=1)) + n
        found += [int(end) for end in ends[::-1] if end not in found]
        if len(found) >= 4 * count:
            break
    return found
