"""Drafts from the texts themselves, decided once a round for all sequences together; both loops ask it first.

A loop, a quotation or an edit is continued from the text at no cost, and deeper than a model's tree would go. Where the
text does not repeat itself habits may continue it, or the model is asked, if there is one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.batch import Batch, Wish
from specbuild.runtime.speculation.policy import SequencePolicy
from specbuild.runtime.speculation.rest import FORETOLD, REPEATED, Rest
from specbuild.runtime.speculation.tree import Tree

from .habits import Habits
from .lookup import decided, forced, from_text, look, room


class TextDrafts:
    """Drafts from texts, as far as the policies of a round's sequences decide it together; learns habits."""

    def __init__(self, looks_up: bool = True, habits: Habits | None = None, padded: bool = False) -> None:
        """Make it for one loop.

        Args:
            looks_up: Whether texts are continued from themselves; False leaves drafting to the model.
            habits: The initial habits; None: empty ones.
            padded: Whether steps have as many nodes of every sequence as of the one that drafts most.
        """
        self.looks_up, self.habits, self._padded = looks_up, habits or Habits(), padded
        self.share: Callable[..., None] | None = None  # divides the last round's verified nodes among its trees

    def again(self, looks_up: bool) -> TextDrafts:
        """Return another one that has learnt nothing yet."""
        return TextDrafts(looks_up, self.habits.fresh(), self._padded)

    def trees(self, sequences: Seq[Sequence], cached: Seq[int] | None) -> list[Tree | None]:
        """Return trees from texts alone; None: ask the model. Sequences with a policy are decided together.

        Args:
            sequences: The sequences that draft.
            cached: By slot, how many tokens of its text the model has run; None: there is no model.
        """
        for sequence in sequences:
            if policy := sequence.policy:
                policy.live.settle()  # what it takes is no time of this decision
                policy.owed = len(sequence.tokens) - 1 - cached[sequence.slot] if cached is not None else 0
        began = time.perf_counter()
        habits = self.habits if self.looks_up else None
        trees = self._together(sequences, habits)
        rest = len(sequences), self.looks_up, cached is not None, habits
        found = [trees[s.slot] if s.slot in trees else from_text(s, *rest) for s in sequences]
        took = time.perf_counter() - began
        for sequence, tree in zip(sequences, found, strict=True):
            if policy := sequence.policy:
                policy.rest.waits.took = took
                policy.rest.took = 0.0 if sequence.sampler.foresees else took / len(sequences)  # 0: it never rests
                if tree and policy.spare and self.looks_up:
                    self._fill(sequence, policy, tree)
        return found

    def _together(self, sequences: Seq[Sequence], habits: Habits | None) -> dict[int, Tree | None]:
        """Return by slot what the sequences draft that are decided together: several, or one in a step with room."""
        deciding: list[Any] = [(s, s.policy, s.shape) for s in sequences if s.policy and s.shape]
        trees, self.share = dict[int, Tree | None](), None
        if len(deciding) < 2 and all((policy.live.lanes or 1) == 1 for _, policy, _ in deciding):
            return trees
        for sequence, _, shape in deciding:
            if sequence.sampler.foresees and (tree := forced(sequence, shape, len(sequences))):
                trees[sequence.slot] = tree
        deciding = [each for each in deciding if each[0].slot not in trees]
        if deciding:
            places = [(each, look(each[0], each[1], self.looks_up, habits)) for each in deciding]
            batch = Batch([Wish(p, at[1], room(s), s.pending) for (s, p, _), at in places], self._padded)
            batch.decide()
            self.share = batch.share
            trees |= {s.slot: decided(s, p, shape, at[0]) for (s, p, shape), at in places}
        return trees

    def _fill(self, sequence: Sequence, policy: SequencePolicy, tree: Tree) -> None:
        """Add a habit's token to a plain round that has a row to spare."""
        token = self.habits.guess(sequence.tokens, sequence.params.cache_salt, policy.guess)
        if token is not None and sequence.sampler.follow((), [token], 1) == [token]:
            tree.add(token, 0)
            policy.fill()

    def learn(self, sequence: Sequence, count: int) -> None:
        """Learn habits from a sequence's last `count` tokens, and from those of rounds before that decided nothing."""
        if policy := sequence.policy:
            count, policy.rest.dozed = count + policy.rest.dozed, 0
        self.habits.learn(sequence.tokens, count, sequence.params.cache_salt)

    def reflect(self, sequence: Sequence, rest: Rest) -> None:
        """Learn from what a resting sequence emitted, and wake it if its last tokens could have been drafted."""
        new, text = rest.dozed, sequence.string
        repeats = text.rfind(text[-REPEATED:], 0, -1) >= 0
        rest.looked(repeats or self.habits.foretold(sequence.tokens, FORETOLD, sequence.params.cache_salt))
        self.learn(sequence, new)
