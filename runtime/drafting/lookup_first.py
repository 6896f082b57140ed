"""Lookup where the text repeats itself, and elsewhere the draft model, if there is one.

A loop, a quotation or an edit is continued from the text at no cost, and deeper than a model's tree would go. The model
drafts the rest, and its cache catches up when it is asked. A plain step with a row to spare drafts from habits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext

from specbuild.runtime.backends.executor import Executor
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.batch import Batch, Wish
from specbuild.runtime.speculation.policy import SequencePolicy
from specbuild.runtime.speculation.rest import DEEP, FORETOLD, REPEATED, Rest
from specbuild.runtime.speculation.tree import Tree

from .habits import Habits
from .lookup import decided, forced, from_text, longest, look, room
from .model import ModelDrafter


class LookupDrafter:
    """Drafts from the text first; the model, if there is one, drafts where the text does not repeat itself.

    With a model: lookup if the last few tokens have occurred before and a chain fills the asked tree. Without one: the
    continuations of the best matches, merged into a tree of the asked shape; the root alone if there is no match.
    """

    def __init__(self, model: ModelDrafter | None = None, looks_up: bool = True, habits: Habits | None = None) -> None:
        """Make a drafter with or without a model.

        Args:
            model: Drafts where the text does not repeat itself; None: nothing does.
            looks_up: Whether texts are continued from themselves; False leaves drafting to the model.
            habits: The initial habits; None: empty ones.
        """
        self.model, self._looks_up, self.habits = model, looks_up, habits or Habits()
        self._repeating: set[int] = set()  # slots whose tree came from the text

    @property
    def executor(self) -> Executor | None:
        """The executor of the draft model; None if there is none."""
        return self.model.executor if self.model else None

    def propose(self, sequences: Seq[Sequence]) -> list[Tree]:
        """Return a tree per sequence, from the text or from the model."""
        began, trees = time.perf_counter(), self._from_texts(sequences)
        took = (time.perf_counter() - began) / len(sequences)
        for sequence, tree in zip(sequences, trees, strict=True):
            if policy := sequence.policy:
                policy.rest.took = 0.0 if sequence.sampler.foresees else took  # so it never rests
                if tree and policy.spare and self._looks_up:
                    self._fill(sequence, policy, tree)
        self._repeating = {s.slot for s, tree in zip(sequences, trees, strict=True) if tree}
        asked = [s for s, tree in zip(sequences, trees, strict=True) if not tree]
        proposed = self.model.propose(asked) if self.model and asked else ()
        drafted = iter(proposed)
        return [tree or next(drafted) for tree in trees]

    def _from_texts(self, sequences: Seq[Sequence]) -> list[Tree | None]:
        """Return trees from texts alone; None: ask the model. Sequences with a policy are decided together."""
        deciding = [(s, s.policy, s.shape) for s in sequences if s.policy and s.shape]
        if self.model:
            for sequence, policy, _ in deciding:
                policy.owed = len(sequence.tokens) - 1 - self.model.cached[sequence.slot]
        share, trees, habits = None, dict[int, Tree | None](), self.habits if self._looks_up else None
        if len(deciding) > 1 or any((policy.live.lanes or 1) > 1 for _, policy, _ in deciding):
            for sequence, _, shape in deciding:
                if sequence.sampler.foresees and (tree := forced(sequence, shape, len(sequences))):
                    trees[sequence.slot] = tree
            deciding = [each for each in deciding if each[0].slot not in trees]
            if deciding:
                places = [(each, look(*each[:2], self._looks_up, habits)) for each in deciding]
                batch = Batch([Wish(p, at[1], room(s), s.pending) for (s, p, _), at in places])
                batch.decide()
                share = batch.share
                trees |= {s.slot: decided(s, p, shape, at[0]) for (s, p, shape), at in places}
        if self.model:
            self.model.share = share
        rest = len(sequences), self._looks_up, self.model is not None, habits
        return [trees[s.slot] if s.slot in trees else from_text(s, *rest) for s in sequences]

    def _fill(self, sequence: Sequence, policy: SequencePolicy, tree: Tree) -> None:
        token = self.habits.guess(sequence.tokens, sequence.params.cache_salt, policy.guess)
        if token is not None and sequence.sampler.follow((), [token], 1) == [token]:
            tree.add(token, 0)
            policy.fill()

    def ahead(self, sequences: Seq[Sequence]) -> AbstractContextManager[None]:
        """See `Drafter.ahead`; the model drafts ahead where it was asked."""
        return self.model.ahead(sequences) if self.model else nullcontext()

    def commit(self, sequence: Sequence, path: Seq[int]) -> None:
        """See `Drafter.commit`; habits learn the accepted tokens, and the model keeps its rows if it drafted."""
        self.habits.learn(sequence.tokens, len(path), sequence.params.cache_salt)
        if self.model and sequence.slot not in self._repeating:
            self.model.commit(sequence, path)

    def reflect(self, sequence: Sequence, rest: Rest) -> None:
        """Learn from what a resting sequence emitted, and wake it if its last tokens could have been drafted."""
        salt, new = sequence.params.cache_salt, rest.dozed
        repeats = rest.left % DEEP == 0 and longest(sequence.history)[1] >= REPEATED
        rest.looked(repeats or self.habits.foretold(sequence.tokens, FORETOLD, salt))
        self.habits.learn(sequence.tokens, new, salt)

    def keep(self, slot: int, source: int, rows: int) -> None:
        """See `Drafter.keep`; only the model has rows."""
        if self.model:
            self.model.keep(slot, source, rows)

    def release(self, slot: int) -> None:
        """See `Drafter.release`."""
        if self.model:
            self.model.release(slot)

    def close(self) -> None:
        """Free the draft model."""
        if self.model:
            self.model.close()
