"""Prompt lookup: drafts what followed earlier occurrences of the text's last tokens; needs no model.

Source: Saxena, "Prompt Lookup Decoding" (2023); the n-gram drafter of vLLM and transformers. Two things differ: the
longest match comes first, whatever its length, and a continuation that reaches the end of the text goes on with what it
has drafted, so that a loop is drafted to any depth.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from specbuild.runtime.speculation.tree import Tree, TreeSpec

LONGEST = 12  # maximum tokens compared
SURE = 4  # tokens that must match for the text to count as repeating itself
SURE_GREEDY = 2  # the same at temperature 0, where texts repeat themselves sooner and longer
_MAX_MATCHES = 32  # of each length


def lookup(tokens: Seq[int], text: str, spec: TreeSpec) -> Tree:
    """Return the tree of continuations: at most `branch` matches, `width` nodes a level, `nodes` in all.

    A match of SURE tokens may fill a best:N tree alone, as a chain deeper than its levels.
    """
    tree = Tree([tokens[-1]])
    children: dict[tuple[int, int], int] = {}
    for rank, (start, length) in enumerate(matches(text, spec.branch)):
        alone = rank == 0 and length >= SURE and spec.fills_with_chain
        node = 0
        for token in continuation(tokens, start, spec.nodes if alone else spec.depth):
            child = children.get((node, token))
            if child is None:
                depth = tree.depths[node] + 1
                if len(tree) > spec.nodes or tree.depths.count(depth) >= spec.width:
                    break
                child = children[node, token] = tree.add(token, node)
            node = child
    return tree


def repeats(tokens: Seq[int], text: str, spec: TreeSpec, sure: int) -> Tree | None:
    """Return the continuation as a chain that fills the tree; None unless the last `sure` tokens occurred before."""
    start, matched = longest(text) if spec.fills_with_chain else (0, 0)
    return Tree.chain([tokens[-1], *continuation(tokens, start, spec.nodes)]) if matched >= sure else None


def matches(text: str, count: int) -> list[tuple[int, int]]:
    """Return earlier occurrences of a text's end, best first: (index of the token after it, tokens that match).

    The longest match is best; among equals, the most recent one. `text`: see `string_of`.
    """
    found = dict[int, int]()
    for length in range(longest(text)[1], 0, -1):
        end = len(text) - 1
        for _ in range(_MAX_MATCHES):
            if len(found) == count or (at := text.rfind(text[-length:], 0, end)) < 0:
                break
            found.setdefault(at + length, length)
            end = at + length - 1
    return list(found.items())


def longest(text: str) -> tuple[int, int]:
    """Return the best of `matches`; (0, 0) if there is none."""
    after = length = 0
    while length < LONGEST and (at := text.rfind(text[-length - 1 :], 0, len(text) - 1)) >= 0:
        after, length = at + length + 1, length + 1
    return after, length


def continuation(tokens: Seq[int], start: int, count: int) -> list[int]:
    """Return `count` tokens from `start` on; past the end of the text, those just drafted are repeated."""
    found, period = list(tokens[start : start + count]), len(tokens) - start
    while len(found) < count:
        found.append(found[len(found) - period])
    return found
