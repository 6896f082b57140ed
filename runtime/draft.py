"""Drafters: whatever proposes a round's trees."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from . import nvtx
from .backends import Executor, Share, share_rows
from .policy import Outlook
from .sequence import Sequence
from .tree import Tree, TreeSpec

DrafterName = Literal["model", "ngram"]
PATIENCE = 4  # tokens outside top-p the draft passes over before it stops looking for children


class Drafter(Protocol):
    """Proposes trees, and is told which path of each was accepted."""

    @property
    def executor(self) -> Executor | None:
        """The model that drafts; None where none does."""
        ...

    def propose(self, sequences: Seq[Sequence]) -> list[Tree]:
        """A tree per sequence, its root the sequence's last token; may be the root alone."""
        ...

    def commit(self, sequence: Sequence, path: Seq[int]) -> None:
        """`path`: the accepted nodes of the tree just proposed, the root first."""
        ...

    def keep(self, slot: int, source: int, rows: int) -> None:
        """A slot's new sequence begins with the first `rows` tokens of what is, or was last, in slot `source`."""
        ...

    def release(self, slot: int) -> None:
        """The sequence in this slot has ended."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


@dataclass(slots=True)
class Growth:
    """A tree while it grows: the pool of kept candidates, and which of them the draft has run.

    Pool index 0 is the root. `rows[i]`: the cache row of node i, counted from the committed rows; −1 until it is run.
    """

    spec: TreeSpec
    pool: Tree
    scores: list[float] = field(default_factory=lambda: [0.0])
    rows: list[int] = field(default_factory=lambda: [-1])
    frontier: list[int] = field(default_factory=lambda: [0])
    depth: int = 0
    run: int = 0  # nodes that have a row
    seen: NDArray[np.bool_] | None = None  # bool[rows, rows]: who sees whom
    kept: list[int] = field(default_factory=list)  # the final tree's nodes in the pool, root first
    outlook: Outlook | None = None  # says how far it is worth going; the scores are then the logarithms of chances

    def grow(self, tokens: NDArray[np.int64], likely: NDArray[np.float64]) -> None:
        """Add a level: the frontier's children, `[frontier, branch]`, and their `likelihoods`."""
        flat = (likely + np.array([self.scores[node] for node in self.frontier])[:, None]).ravel()
        order = np.argsort(-flat, kind="stable")[: self.spec.width] if flat.size > 1 else np.zeros(1, dtype=np.int64)
        level = []
        for index, score in zip(order.tolist(), flat[order].tolist(), strict=True):
            if score > -np.inf:
                level.append(self.pool.add(int(tokens.flat[index]), self.frontier[index // self.spec.branch]))
                self.scores.append(score)
                self.rows.append(-1)
        self.depth += 1
        best = set(self.best())
        self.frontier = [node for node in level if node in best][: self.spec.expand]
        if self.outlook and not self.done:
            self.frontier = self.frontier[: self.outlook.expands([self.scores[node] for node in self.frontier])]

    def best(self, nodes: int | None = None) -> list[int]:
        """The root and the best `nodes` of the pool; an ancestor never scores below its descendants."""
        count = self.spec.nodes if nodes is None else nodes
        if len(self.pool) <= count + 1:
            return list(range(len(self.pool)))
        order = sorted(range(1, len(self.pool)), key=lambda n: -self.scores[n])  # stable: parents first
        return [0, *sorted(order[:count])]

    @property
    def done(self) -> bool:
        """No further level is wanted."""
        return self.depth >= self.spec.depth or not self.frontier

    def tree(self) -> Tree:
        """The final tree; remembers where its nodes lie in the pool."""
        outlook, tree = self.outlook, self.pool
        best = sorted(self.scores[1:], reverse=True)[: self.spec.nodes] if outlook else []
        self.kept = self.best(outlook.verifies(best) if outlook else None)
        if len(self.kept) < len(self.pool):
            tree, index = Tree([self.pool.tokens[0]]), {0: 0}
            for node in self.kept[1:]:
                index[node] = tree.add(self.pool.tokens[node], index[self.pool.parents[node]])
        if outlook:
            outlook.promise(tree.parents, [self.scores[node] for node in self.kept])
        return tree

    def place(self) -> NDArray[np.bool_] | None:
        """Give the frontier its rows; returns which rows since the committed ones its nodes see, None for a chain."""
        first = self.run
        for node in self.frontier:
            self.rows[node] = self.run
            self.run += 1
        if self.spec.width == 1:
            return None
        size = self.run
        if self.seen is None:
            limit = self.spec.expand * self.spec.depth
            self.seen = np.zeros((limit, limit), dtype=np.bool_)
        for node in self.frontier:
            row, above = self.rows[node], self.rows[self.pool.parents[node]]
            if above >= 0:
                self.seen[row] = self.seen[above]
            self.seen[row, row] = True
        return self.seen[first:size, :size]


def best_tokens(logits: NDArray[np.float32], count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Per row the `count` best tokens, best first, and their `likelihoods`; `logits` is overwritten."""
    best = logits.argmax(axis=1)
    if count == 1:
        return best[:, None], np.zeros((len(logits), 1))
    rows = np.arange(len(logits))
    tokens = np.empty((len(logits), count), dtype=np.int64)
    scores = np.empty((len(logits), count))
    for rank in range(count):
        tokens[:, rank], scores[:, rank] = best, logits[rows, best]
        logits[rows, best] = -np.inf
        best = logits.argmax(axis=1)
    return tokens, likelihoods(scores)


def likelihoods(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """The logarithms of the children's probabilities, as if there were no others: `scores [n, count]`, best first.

    A sum over the whole vocabulary costs more and drafts worse: trees grow too little in depth.
    """
    with np.errstate(invalid="ignore"):  # a row of −inf alone
        relative = scores - scores[:, :1]
        result: NDArray[np.float64] = relative - np.log(np.exp(relative).sum(axis=1, keepdims=True))
    return np.where(np.isnan(result), -np.inf, result)


class ModelDrafter:
    """A small language model, run level by level: only new nodes, keys and values in place.

    Its cache may be behind by the last accepted leaf, the bonus token and whatever was emitted while it was not
    asked; it catches up before it drafts.
    """

    def __init__(self, executor: Executor, chunk: int) -> None:
        self.executor, self._chunk = executor, chunk
        self._cached = [0] * executor.batch_size  # per slot: tokens whose rows are committed
        self._growth: dict[int, Growth] = {}

    def propose(self, sequences: Seq[Sequence]) -> list[Tree]:
        """Grow all sequences' trees together, a step of the draft a level."""
        growths = [Growth(s.shape, Tree([s.tokens[-1]]), outlook=s.outlook) for s in sequences if s.shape]
        logits = self._catch_up(sequences)
        growing = list(zip(sequences, growths, strict=True))
        while True:
            for (sequence, growth), rows in zip(growing, logits, strict=True):
                growth.grow(*self._children(sequence, growth, rows))
            growing = [(s, g) for s, g in growing if not g.done]
            if not growing:
                break
            with nvtx.range("draft level"):
                logits = self.executor.step([self._level(s, g) for s, g in growing])
        self._growth.update((s.slot, g) for s, g in zip(sequences, growths, strict=True))
        return [growth.tree() for growth in growths]

    def _catch_up(self, sequences: Seq[Sequence]) -> list[NDArray[np.float32]]:
        """Run what each sequence's cache is behind, its last token included; the logits after it."""
        while True:
            behind = [s for s in sequences if len(s.tokens) - self._cached[s.slot] > self._chunk]
            if not behind:
                with nvtx.range("draft level"):
                    return self.executor.step([self._chain(s, 1) for s in sequences])
            self.executor.step([self._chain(s, 0) for s in behind])

    def _chain(self, sequence: Sequence, logits: int) -> Share:
        start = self._cached[sequence.slot]
        stop = min(len(sequence.tokens), start + self._chunk)
        self._cached[sequence.slot] = stop
        return Share(sequence.slot, start, start, sequence.tokens[start:stop], range(start, stop), None, logits)

    def _level(self, sequence: Sequence, growth: Growth) -> Share:
        """The share that runs a growth's frontier."""
        committed, nodes = self._cached[sequence.slot], growth.frontier
        start = committed + growth.run
        visible = growth.place()
        tokens = [growth.pool.tokens[node] for node in nodes]
        return Share(
            sequence.slot, start, committed, tokens, [committed - 1 + growth.depth] * len(nodes), visible, len(nodes)
        )

    def _children(
        self, sequence: Sequence, growth: Growth, logits: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The frontier's best children by the target's own processors and noise, and how likely each seems.

        Under noise, the scores' softmax is a guess at how likely the target chooses the same.
        """
        tokens, likely = self._best(sequence, growth, logits)
        return tokens, growth.outlook.log_chances(likely) if growth.outlook else likely

    def _best(
        self, sequence: Sequence, growth: Growth, logits: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        if sequence.sampler.greedy:
            return best_tokens(logits, growth.spec.branch)
        position = len(sequence.tokens) - 1 + growth.depth
        tokens = np.zeros((len(logits), growth.spec.branch), dtype=np.int64)
        scores = np.full(tokens.shape, -np.inf)
        for i, (node, row) in enumerate(zip(growth.frontier, logits, strict=True)):
            ranked = sequence.sampler.ranked(row, position, growth.pool.path(node), PATIENCE)
            for j, (token, score) in enumerate(islice(ranked, growth.spec.branch)):
                tokens[i, j], scores[i, j] = token, score
        return tokens, likelihoods(scores)

    def commit(self, sequence: Sequence, path: Seq[int]) -> None:
        """Keep the rows of the accepted nodes that were run; the root's is in place."""
        growth = self._growth.pop(sequence.slot)
        start = self._cached[sequence.slot]
        rows = [start + row for row in (growth.rows[growth.kept[node]] for node in path[1:]) if row >= 0]
        self.executor.commit(sequence.slot, rows, start)
        self._cached[sequence.slot] = start + len(rows)

    def keep(self, slot: int, source: int, rows: int) -> None:
        """Keep what the cache has of these rows; see `Drafter.keep`."""
        self._cached[slot] = min(rows, self._cached[source])
        share_rows(self.executor, slot, source, self._cached[slot])

    def release(self, slot: int) -> None:
        """Forget a slot's tree."""
        self._growth.pop(slot, None)
        self.executor.commit(slot, (), self._cached[slot])

    def close(self) -> None:
        """Free the draft."""
        self.executor.close()
