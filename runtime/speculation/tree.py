"""Token trees: the shape that is asked for (`TreeSpec`), and what a round drafts (`Tree`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.errors import OptionError

BEST_BRANCH = 4  # children considered of each node, in best:N
BEST_EXPAND = 8  # nodes expanded in a level of best:N
BEST_DEPTH = 8  # maximum levels of best:N
GRAMMAR = "chain:K (K nodes in a row), topk:W,D (D levels of W nodes) or best:N (N nodes, best first)"


@dataclass(frozen=True, slots=True)
class TreeSpec:
    """The shape of what a round may draft; the root is never counted.

    Level by level, every expanded node proposes its `branch` best children; the `width` best candidates of a level
    stay, the `expand` best of those are expanded in turn, `depth` levels deep, and the `nodes` best of all make the
    tree. In that order `chain:K` is (1, 1, 1, K, K) and `topk:W,D` (W, W, W, D, W·D); `best:N` considers 4 children of
    each of 8 nodes a level and keeps the N best of all levels (the dynamic tree of EAGLE-2, arXiv 2406.16858).

    Attributes:
        text: The spec as it was given, such as "chain:4"; `within` leaves it as it is.
        branch: Number of children that each expanded node proposes.
        width: Maximum candidates that stay in a level.
        expand: Maximum nodes of a level that are expanded.
        depth: Maximum levels below the root.
        nodes: Maximum nodes of the tree.
    """

    text: str
    branch: int
    width: int
    expand: int
    depth: int
    nodes: int

    @classmethod
    def parse(cls, text: str) -> TreeSpec:
        """Parse `text`, a spec of the grammar `GRAMMAR`; raise OptionError if it is not one."""
        if not isinstance(text, str) or not re.fullmatch(r"(chain|best):\d{1,6}|topk:\d{1,6},\d{1,6}", text):
            raise OptionError(f"unknown tree {text!r}: use {GRAMMAR}")
        kind, _, numbers = text.partition(":")
        first, *rest = map(int, numbers.split(","))
        if not all(1 <= number <= 4096 for number in (first, *rest)):
            raise OptionError(f"tree {text!r} has a number out of range: every number is from 1 to 4096")
        if kind == "chain":
            return cls(text, 1, 1, 1, first, first)
        if kind == "topk":
            return cls(text, first, first, first, rest[0], first * rest[0])
        return cls(text, min(first, BEST_BRANCH), first, min(first, BEST_EXPAND), min(first, BEST_DEPTH), first)

    def check(self, largest_bucket: int) -> TreeSpec:
        """Return the spec if root and nodes fit a step of `largest_bucket` nodes; raise OptionError otherwise."""
        if self.nodes + 1 > largest_bucket:
            raise OptionError(
                f"tree {self.text!r} drafts {self.nodes} nodes, this bundle verifies at most {largest_bucket - 1}"
            )
        return self

    def within(self, nodes: int) -> TreeSpec | None:
        """Return the spec with at most `nodes` nodes; None for 0."""
        if nodes >= self.nodes:
            return self
        return replace(self, nodes=nodes, depth=min(self.depth, nodes)) if nodes else None

    @property
    def trunk(self) -> TreeSpec:
        """The chain of the same depth."""
        return TreeSpec.parse(f"chain:{self.depth}")

    @property
    def longest_chain(self) -> int:
        """The most tokens of a single chain within this shape; chain:K and best:N may spend all nodes on one."""
        return self.depth if self.text.startswith("topk") else self.nodes

    def __str__(self) -> str:
        return self.text


@dataclass(slots=True)
class Tree:
    """The proposed tokens of one sequence's round; node 0 is the root, and parents come before children."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> Tree:
        """Return a tree without branches: the root and the tokens that follow it."""
        return cls(list(tokens), list(range(-1, len(tokens) - 1)), list(range(len(tokens))))

    def add(self, token: int, parent: int) -> int:
        """Append a node and return its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        return len(self.tokens) - 1

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Return whether node i + 1 is the child of node i, so that causal order is the tree's own order."""
        return self.depths[-1] == len(self.tokens) - 1

    def children(self) -> dict[tuple[int, int], int]:
        """Return a map of (parent, token) to node; siblings never share a token."""
        return {(p, t): n for n, (p, t) in enumerate(zip(self.parents, self.tokens, strict=True))}

    def path(self, node: int) -> list[int]:
        """Return the tokens from below the root down to `node`."""
        tokens: list[int] = []
        while node > 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def ancestors(self) -> NDArray[np.bool_]:
        """Return `bool[N, N]`: row i is true at i and at every ancestor of i."""
        visible = np.eye(len(self.tokens), dtype=np.bool_)
        for node in range(1, len(self.tokens)):
            visible[node] |= visible[self.parents[node]]
        return visible


def walk(tree: Tree, choose: Callable[[int], int]) -> Iterator[tuple[int, int]]:
    """Yield `(node, token)` for each accepted node, the root first; the token is the target's choice there.

    The walk goes on while a child carries the choice; the last token is the bonus token. `choose(node)` is called only
    at accepted nodes, and only as far as the caller goes on. The target's choice is a function of its logits, the
    node's path and the noise at its position, never of the draft, so the accepted text is the same whatever was drafted
    (Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding", 2024).
    """
    children = tree.children() if len(tree) > 1 else {}
    node: int | None = 0
    while node is not None:
        token = choose(node)
        yield node, token
        node = children.get((node, token))
