"""The drafter that runs a draft model, level by level."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends import nvtx
from specbuild.runtime.backends.executor import Executor, StepInput, share_rows
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.sampling.sampler import Sampler
from specbuild.runtime.speculation.cost_model import CostModel
from specbuild.runtime.speculation.tree import Tree, TreeSpec
from specbuild.runtime.speculation.tree_growth import Growth, GrowthRule, best_tokens, likelihoods

DrafterName = Literal["model", "ngram"]
PATIENCE = 4  # tokens outside top-p that the draft skips before it stops looking for children


class KeepsRows(Protocol):
    """The holder of a draft's cache, which has the same slots as the target's."""

    @property
    def executor(self) -> Executor | None:
        """The executor of the draft model; None if no model drafts."""
        ...

    def keep(self, slot: int, source: int, rows: int) -> None:
        """Set up a slot whose new sequence begins with the first `rows` tokens of slot `source`'s last text."""
        ...

    def release(self, slot: int) -> None:
        """Note that a slot's sequence has ended."""
        ...


@dataclass(slots=True)
class DraftInput:
    """A text to draft for."""

    slot: int
    tokens: list[int]
    sampler: Sampler
    growth: Growth


class ModelDrafter:
    """Drafts with a small language model, level by level: a step runs only new nodes, keys and values stay in place.

    Its cache may lack the last accepted leaf, the bonus token and what was emitted while it was not asked; it catches
    up before it drafts.
    """

    def __init__(
        self,
        executor: Executor,
        chunk: int,
        tokens: NDArray[np.int64] | None = None,
        cached: list[int] | None = None,
    ) -> None:
        """Make a drafter over a loaded draft model.

        Args:
            executor: Executor of the draft.
            chunk: Maximum nodes of a text in a step.
            tokens: Token id of each column of the logits; None: the column's number.
            cached: By slot, tokens whose rows are cached, shared with another drafter of the same model; None: its own.
        """
        self.executor, self._chunk, self._tokens = executor, chunk, tokens
        self.cached = cached or [0] * executor.batch_size  # per slot: tokens whose rows are committed
        self.cost: CostModel | None = None  # records what steps take
        self._growth: dict[int, Growth] = {}

    def again(self) -> Self:
        """Return another drafter of the same model, which has seen no text yet."""
        return type(self)(self.executor, self._chunk, self._tokens)

    def growth(self, slot: int) -> Growth:
        """Return how the tree just proposed for a slot grew."""
        return self._growth[slot]

    def propose(self, sequences: Seq[Sequence]) -> list[Tree]:
        """Return a tree of its asked shape for each sequence."""
        return [growth.tree() for growth in self.grow([(s, s.shape, None) for s in sequences if s.shape])]

    def grow(self, asked: Seq[tuple[Sequence, TreeSpec, GrowthRule | None]]) -> list[Growth]:
        """Grow trees for sequences together, one draft step for each level, by their shapes and rules."""
        texts = [
            DraftInput(s.slot, s.tokens, s.sampler, Growth(shape, Tree([s.tokens[-1]]), rule))
            for s, shape, rule in asked
        ]
        self._grow(list(texts))
        for text, (sequence, *_) in zip(texts, asked, strict=True):
            if text.sampler.foresees:
                text.growth.prolong(text.sampler.follow, sequence.request.max_tokens - len(text.tokens) - 1)
        self._growth.update((text.slot, text.growth) for text in texts)
        return [text.growth for text in texts]

    def _grow(self, growing: list[DraftInput]) -> None:
        """Grow all levels of all texts' trees."""
        logits = self._catch_up(growing) if growing else []
        while growing:
            for text, rows in zip(growing, logits, strict=True):
                text.growth.grow(*self._children(text, rows))
            most = self.executor.spec.capacity  # near the end of the longest text they may end a tree
            ends = [self.cached[text.slot] + text.growth.run + len(text.growth.frontier) for text in growing]
            growing = [text for text, end in zip(growing, ends, strict=True) if not text.growth.done and end <= most]
            if growing:
                with nvtx.range("draft level"):
                    logits = self._step([self._level(text) for text in growing])

    def _catch_up(self, texts: Seq[DraftInput]) -> list[NDArray[np.float32]]:
        """Run what each text's cache lacks, its last token included, and return the logits after it."""
        while True:
            behind = [text for text in texts if self._behind(text) > self._chunk]
            if not behind:
                caught_up = all(len(text.tokens) - self.cached[text.slot] <= 2 for text in texts)
                with nvtx.range("draft level"):
                    return self._step([self._last(text) for text in texts], caught_up)
            self.executor.step([self._chain(text, 0) for text in behind])

    def _step(self, inputs: Seq[StepInput], timed: bool = True) -> list[NDArray[np.float32]]:
        """Run a step, and record what it took unless it read what the table's steps do not."""
        before, logits = self.executor.seconds, self.executor.step(inputs)
        if self.cost and timed:
            self.cost.record("draft", sum(len(each.tokens) for each in inputs), self.executor.seconds - before)
        return logits

    def _behind(self, text: DraftInput) -> int:
        """Return how many rows a text's cache lacks."""
        return len(text.tokens) - self.cached[text.slot]

    def _last(self, text: DraftInput) -> StepInput:
        """Return the last chunk, whose logits give the first level."""
        return self._chain(text, 1)

    def _chain(self, text: DraftInput, logits: int) -> StepInput:
        start = self.cached[text.slot]
        stop = min(len(text.tokens) - (not logits), start + self._chunk)  # the last token is left for the last step
        self.cached[text.slot] = stop
        return StepInput(text.slot, start, start, text.tokens[start:stop], range(start, stop), None, logits)

    def _level(self, text: DraftInput) -> StepInput:
        """Return the step input that runs a growth's frontier."""
        growth, committed = text.growth, self.cached[text.slot]
        nodes, start = growth.frontier, committed + growth.run
        visible = growth.place()
        tokens = [growth.pool.tokens[node] for node in nodes]
        positions = [committed - 1 + growth.depth] * len(nodes)
        return StepInput(text.slot, start, committed, tokens, positions, visible, len(nodes))

    def _children(self, text: DraftInput, logits: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the frontier's best children by the target's own processors and noise, and their log likelihoods."""
        growth = text.growth
        if text.sampler.greedy:
            columns, likely = best_tokens(logits, growth.spec.branch)
            return columns if self._tokens is None else self._tokens[columns], likely
        if self._tokens is not None:
            logits = spread(logits, self._tokens, text.sampler.vocab_size)
        position = len(text.tokens) - 1 + growth.depth
        if (together := text.sampler.scores(logits, position)) is not None:
            return best_tokens(together, growth.spec.branch)
        tokens = np.zeros((len(logits), growth.spec.branch), dtype=np.int64)
        scores = np.full(tokens.shape, -np.inf)
        for i, (node, row) in enumerate(zip(growth.frontier, logits, strict=True)):
            path, branch = growth.pool.path(node), growth.spec.branch
            ranked = text.sampler.drafted(row, position, path, PATIENCE, branch)
            for j, (token, score) in enumerate(islice(ranked, branch)):
                tokens[i, j], scores[i, j] = token, score
        return tokens, likelihoods(scores)  # under noise, a guess at how likely the target chooses the same

    def commit(self, sequence: Sequence, path: Seq[int]) -> None:
        """Keep the rows of accepted nodes; `path`: the nodes of the tree just proposed, the root first."""
        growth = self._growth.pop(sequence.slot)
        self._move(sequence.slot, [growth.rows[growth.kept[node]] for node in path[1:] if node < len(growth.kept)])

    def _move(self, slot: int, rows: Seq[int]) -> None:
        """Commit rows by moving them behind the committed ones, from which they are counted; −1: no row."""
        start = self.cached[slot]
        moved = [start + row for row in rows if row >= 0]
        self.executor.commit(slot, moved, start)
        self.cached[slot] = start + len(moved)

    def keep(self, slot: int, source: int, rows: int) -> None:
        """See `KeepsRows.keep`; keeps as many of the rows as the cache has."""
        self.cached[slot] = min(rows, self.cached[source])
        share_rows(self.executor, slot, source, self.cached[slot])

    def release(self, slot: int) -> None:
        """See `KeepsRows.release`; forgets the slot's tree."""
        self._growth.pop(slot, None)
        self.executor.commit(slot, (), self.cached[slot])

    def close(self) -> None:
        """Free the draft model."""
        self.executor.close()


def spread(logits: NDArray[np.float32], tokens: NDArray[np.int64], vocab_size: int) -> NDArray[np.float32]:
    """Return logits `[n, columns]` by token, `[n, V]`; −inf for tokens without a column."""
    full = np.full((len(logits), vocab_size), -np.inf, dtype=np.float32)
    full[:, tokens] = logits
    return full
