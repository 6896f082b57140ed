"""Lookup where the text repeats itself, and elsewhere the draft model, if there is one.

The model's cache catches up when it is asked. A plain step with a row to spare drafts from habits.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext

from specbuild.runtime.backends.executor import Executor
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.tree import Tree

from .habits import Habits
from .model import ModelDrafter
from .text_drafts import TextDrafts


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
        self.model, self.texts = model, TextDrafts(looks_up, habits)
        self._repeating: set[int] = set()  # slots whose tree came from the text

    @property
    def executor(self) -> Executor | None:
        """The executor of the draft model; None if there is none."""
        return self.model.executor if self.model else None

    def propose(self, sequences: Seq[Sequence]) -> list[Tree]:
        """Return a tree per sequence, from the text or from the model."""
        trees = self.texts.trees(sequences, self.model.cached if self.model else None)
        self._repeating = {s.slot for s, tree in zip(sequences, trees, strict=True) if tree}
        asked = [s for s, tree in zip(sequences, trees, strict=True) if not tree]
        if self.model:
            self.model.share = self.texts.share
        drafted = iter(self.model.propose(asked) if self.model and asked else ())
        return [tree or next(drafted) for tree in trees]

    def ahead(self, sequences: Seq[Sequence]) -> AbstractContextManager[None]:
        """See `Drafter.ahead`; the model drafts ahead where it was asked."""
        return self.model.ahead(sequences) if self.model else nullcontext()

    def commit(self, sequence: Sequence, path: Seq[int]) -> None:
        """See `Drafter.commit`; habits learn the accepted tokens, and the model keeps its rows if it drafted."""
        self.texts.learn(sequence, len(path))
        if self.model and sequence.slot not in self._repeating:
            self.model.commit(sequence, path)

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
