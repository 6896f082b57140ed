"""Acceptance: walk the tree along the target's own choices.

The target's choice at a node is a function of its logits, the node's path and the noise at its position, never of
the draft, so the accepted text is the same whatever was drafted (Daliri, Musco, Suresh, "Coupling without
Communication and Drafter-Invariant Speculative Decoding", 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .tree import Tree


def walk(tree: Tree, choose: Callable[[int], int | None]) -> Iterator[tuple[int, int]]:
    """Yield `(node, token)` for each accepted node, the root first; the token is the target's choice there.

    The walk goes on while a child carries the choice, and ends where `choose` returns None because it cannot tell; the
    last token is the bonus token. `choose(node)` is called only at accepted nodes, and only as far as the caller goes
    on.
    """
    children = tree.children() if len(tree) > 1 else {}
    node: int | None = 0
    while node is not None:
        token = choose(node)
        if token is None:
            return
        yield node, token
        node = children.get((node, token))
