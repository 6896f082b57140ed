"""The drafter that runs a draft model, level by level."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends import nvtx
from specbuild.runtime.backends.executor import Executor, StepInput, share_rows
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.cost_model import CostModel
from specbuild.runtime.speculation.tree import BEST_BRANCH
from specbuild.runtime.speculation.tree_growth import Growth, best_tokens, likelihoods

DrafterName = Literal["model", "ngram"]


@dataclass(frozen=True, slots=True)
class Draft:
    """A sequence to draft for, and its tree, which grows."""

    sequence: Sequence
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
        cost: CostModel | None = None,
    ) -> None:
        """Make a drafter over a loaded draft model.

        Args:
            executor: Executor of the draft.
            chunk: Maximum nodes of a text in a step.
            tokens: Token id of each column of the logits; None: the column's number.
            cost: Records what steps take; None: nothing does.
        """
        self.executor, self._chunk, self._tokens, self._cost = executor, chunk, tokens, cost
        self.cached = [0] * executor.batch_size  # by slot, tokens whose rows are cached

    def again(self) -> Self:
        """Return another drafter of the same model, which has seen no text yet and records nothing."""
        other = copy(self)
        other.cached, other._cost = [0] * self.executor.batch_size, None
        return other

    def backlog(self, sequence: Sequence) -> int:
        """Return how many tokens of a text the model has to read before it drafts, its last one not counted."""
        return max(len(sequence.tokens) - 1 - self.cached[sequence.slot], 0)

    def grow(self, drafts: Seq[Draft]) -> None:
        """Grow trees together, one draft step for each level, and add what constraints force after their leaves."""
        if drafts:
            self._grow(drafts)
        for draft in drafts:
            sequence, sampler = draft.sequence, draft.sequence.sampler
            if sampler.foresees:
                draft.growth.prolong(sampler.follow, sequence.request.max_tokens - len(sequence.tokens) - 1)

    def _grow(self, drafts: Seq[Draft]) -> None:
        """Grow all levels of all trees."""
        logits = self._catch_up(drafts)
        while drafts:
            for draft, rows in zip(drafts, logits, strict=True):
                draft.growth.grow(*self._children(draft, rows))
            drafts = [draft for draft in drafts if not draft.growth.done and self._has_room(draft)]
            if drafts:
                logits = self._step([self._level(draft) for draft in drafts])

    def _has_room(self, draft: Draft) -> bool:
        """Return whether the cache has rows for the next level: near the end of the longest text it may have none."""
        rows = len(draft.growth.rows) + len(draft.growth.frontier)
        return self.cached[draft.sequence.slot] + rows <= self.executor.spec.capacity

    def _catch_up(self, drafts: Seq[Draft]) -> list[NDArray[np.float32]]:
        """Run what each text's cache lacks, its last token included, and return the logits after it."""
        while behind := [draft for draft in drafts if self._behind(draft) > self._chunk]:
            self.executor.step([self._chain(draft, 0) for draft in behind])
        timed = all(self.backlog(draft.sequence) <= 1 for draft in drafts)
        return self._step([self._chain(draft, 1) for draft in drafts], timed)

    def _step(self, inputs: Seq[StepInput], timed: bool = True) -> list[NDArray[np.float32]]:
        """Run a step, and record what it took unless it read what the table's steps do not."""
        before = self.executor.seconds
        with nvtx.range("draft level"):
            logits = self.executor.step(inputs)
        if self._cost and timed:
            self._cost.record("draft", sum(len(each.tokens) for each in inputs), self.executor.seconds - before)
        return logits

    def _behind(self, draft: Draft) -> int:
        """Return how many rows a text's cache lacks."""
        return len(draft.sequence.tokens) - self.cached[draft.sequence.slot]

    def _chain(self, draft: Draft, logits: int) -> StepInput:
        """Return the next chunk of a text; its last token is left for the last chunk, whose logits give a level."""
        slot, tokens = draft.sequence.slot, draft.sequence.tokens
        start = self.cached[slot]
        stop = self.cached[slot] = min(len(tokens) - (not logits), start + self._chunk)
        return StepInput(slot, start, start, tokens[start:stop], range(start, stop), None, logits)

    def _level(self, draft: Draft) -> StepInput:
        """Return the step input that runs a growth's frontier."""
        growth, slot = draft.growth, draft.sequence.slot
        nodes, committed, start = growth.frontier, self.cached[slot], self.cached[slot] + len(growth.rows)
        visible = growth.place()
        tokens = [growth.pool.tokens[node] for node in nodes]
        positions = [committed - 1 + growth.depth] * len(nodes)
        return StepInput(slot, start, committed, tokens, positions, visible, len(nodes))

    def _children(self, draft: Draft, logits: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the frontier's best children by the target's own processors and noise, and their log likelihoods."""
        growth, sampler, branch = draft.growth, draft.sequence.sampler, draft.growth.spec.branch
        if sampler.greedy:
            best, likely = best_tokens(logits, branch)
            return best if self._tokens is None else self._tokens[best], likely
        if self._tokens is not None:
            columns, logits = logits, np.full((len(logits), sampler.vocab_size), -np.inf, dtype=np.float32)
            logits[:, self._tokens] = columns
        position = len(draft.sequence.tokens) - 1 + growth.depth
        if (together := sampler.scores(logits, position)) is not None:
            return best_tokens(together, branch)
        nothing, rows = repeat((0, -np.inf)), list[list[tuple[int, float]]]()
        for node, row in zip(growth.frontier, logits, strict=True):
            ranked = sampler.drafted(row, position, growth.pool.path(node), BEST_BRANCH, branch)
            rows.append([*islice(chain(ranked, nothing), branch)])
        children = np.array(rows)  # [frontier, branch, (token, score)]
        # Under noise, a guess at how likely the target chooses the same.
        return children[..., 0].astype(np.int64), likelihoods(children[..., 1])

    def commit(self, slot: int, growth: Growth, path: Seq[int]) -> None:
        """Move the rows of a tree's accepted nodes behind the committed ones; `path`: the nodes, the root first."""
        start, nodes = self.cached[slot], [growth.nodes[node] for node in path[1:] if node < len(growth.nodes)]
        rows = [start + growth.rows[node] for node in nodes if node in growth.rows]
        self.executor.commit(slot, rows, start)
        self.cached[slot] = start + len(rows)

    def keep(self, slot: int, source: int, rows: int) -> None:
        """Set up a slot whose new sequence begins with the first `rows` tokens of slot `source`'s last text."""
        self.cached[slot] = min(rows, self.cached[source])  # as many as there are
        share_rows(self.executor, slot, source, self.cached[slot])

    def release(self, slot: int) -> None:
        """Note that a slot's sequence has ended."""
        self.executor.commit(slot, (), self.cached[slot])
