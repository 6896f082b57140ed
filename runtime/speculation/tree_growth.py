"""The growth of a tree by the draft model, level by level, from ranked candidates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .cost_model import RoundCost
from .timing_table import MAX_CHANCE, MIN_CHANCE, Chances
from .tree import Tree, TreeSpec

_HUGE = 1e300


@dataclass(frozen=True, slots=True)
class GrowthRule:
    """When a tree stops growing: a node or level must bring more than its seconds do (CaDDTree, arXiv 2606.01813).

    Attributes:
        chances: The draft model's calibration.
        ratio: Its accepted over its expected tokens.
        rate: Tokens that a second is worth.
        cost: The round's prices.
        trees: Trees that grow in the same draft steps.
    """

    chances: Chances
    ratio: float
    rate: float
    cost: RoundCost
    trees: int = 1

    def expands(self, scores: Sequence[float]) -> int:
        """Return how many nodes of a level, by their log chances, have children that are worth a draft step."""
        step, row = min(self.chances.step * self.ratio, MAX_CHANCE), self.rate * self.cost.row
        gain, best, count = 0.0, 0.0, 0
        for size, score in enumerate(scores, 1):
            gain += max(step * math.exp(score) - row, 0.0)
            profit = gain - self.rate * self.cost.level(size * self.trees) / self.trees
            if profit > best:
                best, count = profit, size
        return count


@dataclass(slots=True)
class Growth:
    """A tree while it grows: the pool of candidates, and which of them the draft has run.

    Pool index 0 is the root. `rows[i]`: the cache row of node i below the root, counted from the committed rows, once
    it is run. `calibrated[i]`: its log chance if its parent is accepted; −inf for a token that a constraint forces.
    """

    spec: TreeSpec
    pool: Tree
    rule: GrowthRule | None = None  # how far to grow; the scores are then log chances
    scores: list[float] = field(default_factory=lambda: [0.0])
    calibrated: list[float] = field(default_factory=lambda: [0.0])
    rows: dict[int, int] = field(default_factory=dict)
    frontier: list[int] = field(default_factory=lambda: [0])
    depth: int = 0
    nodes: list[int] = field(default_factory=list)  # the final tree's nodes in the pool, root first

    def _add(self, token: int, parent: int, score: float, calibrated: float) -> int:
        """Add a candidate to the pool, and return its index."""
        self.scores.append(score)
        self.calibrated.append(calibrated)
        return self.pool.add(token, parent)

    def grow(self, tokens: NDArray[np.int64], likely: NDArray[np.float64]) -> None:
        """Add a level: the frontier's children, `[frontier, branch]`, and their `likelihoods`."""
        own = self.rule.chances.log_chances(likely) if self.rule else likely
        ratio = math.log(max(self.rule.ratio, MIN_CHANCE)) if self.rule else 0.0
        chances = np.minimum(own + ratio, math.log(MAX_CHANCE)) if self.rule else likely
        flat = (chances + np.array([self.scores[node] for node in self.frontier])[:, None]).ravel()
        order = np.argsort(-flat, kind="stable")[: self.spec.width]
        level = []
        for index, score in zip(order.tolist(), flat[order].tolist(), strict=True):
            if score > -np.inf:
                parent = self.frontier[index // self.spec.branch]
                level.append(self._add(int(tokens.flat[index]), parent, score, float(own.flat[index])))
        self.depth += 1
        best = set(self.best())
        self.frontier = [node for node in level if node in best][: self.spec.expand]
        if self.rule and not self.done:
            self.frontier = self.frontier[: self.rule.expands([self.scores[node] for node in self.frontier])]

    def best(self, nodes: int | None = None) -> list[int]:
        """Return the root and the best `nodes` nodes of the pool; an ancestor never scores below its descendants."""
        count = self.spec.nodes if nodes is None else nodes
        order = sorted(range(1, len(self.pool)), key=lambda n: -self.scores[n])  # stable: parents first
        return [0, *sorted(order[:count])]

    def prolong(self, follow: Callable[[Sequence[int], Sequence[int], int], list[int]], depth: int) -> None:
        """Add the forced tokens after each of the best nodes that has no child; they are as likely as that node.

        `follow`: see `Foreseeing`. `depth`: maximum depth of the tree.
        """
        inner = {*self.pool.parents}
        for leaf in [node for node in self.best()[1:] if node not in inner]:
            node, path = leaf, self.pool.path(leaf)
            tokens = follow((), path, min(depth, self.spec.nodes))
            for token in tokens[len(path) :] if tokens[: len(path)] == path else ():
                node = self._add(token, node, self.scores[leaf], -math.inf)

    def ranked(self) -> list[float]:
        """Return the chances of as many nodes as the tree may have, the likeliest first."""
        chances: list[float] = np.exp(sorted(self.scores[1:], reverse=True)[: self.spec.nodes]).tolist()
        return chances

    @property
    def done(self) -> bool:
        """Return whether no further level is wanted."""
        return self.depth >= self.spec.depth or not self.frontier

    def tree(self, nodes: int | None = None) -> Tree:
        """Return the final tree, of its best `nodes` nodes; this remembers their places in the pool."""
        self.nodes = self.best(nodes)
        if len(self.nodes) == len(self.pool):
            return self.pool
        tree, index = Tree(self.pool.tokens[:1]), {0: 0}
        for node in self.nodes[1:]:
            index[node] = tree.add(self.pool.tokens[node], index[self.pool.parents[node]])
        return tree

    def chances(self) -> list[float]:
        """Return, by node of the final tree, the calibrated chance that a child is accepted; 0 if it is forced."""
        index, chances = {node: place for place, node in enumerate(self.nodes)}, [0.0] * len(self.nodes)
        for node in self.nodes[1:]:
            chances[index[self.pool.parents[node]]] += math.exp(self.calibrated[node])
        return chances

    def place(self) -> NDArray[np.bool_] | None:
        """Give the frontier its rows; return which rows after the committed ones its nodes see, or None for a chain."""
        for node in self.frontier:
            self.rows[node] = len(self.rows)
        if self.spec.width == 1:
            return None
        visible = np.zeros((len(self.frontier), len(self.rows)), dtype=np.bool_)
        for node, row in zip(self.frontier, visible, strict=True):
            while node > 0:
                row[self.rows[node]] = True
                node = self.pool.parents[node]
        return visible


def best_tokens(logits: NDArray[np.float32], count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the `count` best tokens of each row, best first, and their `likelihoods`; overwrites `logits`."""
    if count == 1:
        return logits.argmax(axis=1)[:, None], np.zeros((len(logits), 1))
    rows = np.arange(len(logits))
    tokens = np.empty((len(logits), count), dtype=np.int64)
    scores = np.empty((len(logits), count))
    for rank in range(count):
        best = logits.argmax(axis=1)
        tokens[:, rank], scores[:, rank] = best, logits[rows, best]
        logits[rows, best] = -np.inf
    return tokens, likelihoods(scores)


def likelihoods(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the children's log probabilities, as if there were no other tokens: `scores [n, count]`, best first.

    A sum over the whole vocabulary costs more and drafts worse: trees then grow too little in depth.
    """
    relative = scores - np.maximum(scores[:, :1], -_HUGE)  # a row may be all −inf
    total = np.exp(relative).sum(axis=1, keepdims=True)
    result: NDArray[np.float64] = relative - np.log(np.maximum(total, 1 / _HUGE))
    return result
