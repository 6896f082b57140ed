"""Two drafters in one: the text itself where it repeats itself, the draft model elsewhere.

A loop, a quotation or an edit is continued from the text for nothing, and deeper than a model's tree would go; the
model is asked for all the rest, and catches up when it is.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager

from specbuild.runtime.backends.executor import Executor
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.tree import Tree

from .lookup import from_text
from .model import ModelDrafter


class MixedDrafter:
    """Lookup where the last few tokens have occurred before and a chain fills the asked tree; else the model."""

    def __init__(self, model: ModelDrafter, looks_up: bool = True) -> None:
        """`looks_up`: False leaves it all to the model."""
        self.model, self._looks_up = model, looks_up
        self._repeating: set[int] = set()  # slots whose tree is the text's own

    @property
    def executor(self) -> Executor:
        """The draft model."""
        return self.model.executor

    def propose(self, sequences: Seq[Sequence]) -> list[Tree]:
        """A tree per sequence, from the text or from the model."""
        trees = [from_text(s, len(sequences), self._looks_up) for s in sequences]
        self._repeating = {s.slot for s, tree in zip(sequences, trees, strict=True) if tree}
        asked = [s for s, tree in zip(sequences, trees, strict=True) if not tree]
        drafted = iter(self.model.propose(asked) if asked else ())
        return [tree or next(drafted) for tree in trees]

    def ahead(self, sequences: Seq[Sequence]) -> AbstractContextManager[None]:
        """The model drafts ahead where it was asked."""
        return self.model.ahead(sequences)

    def commit(self, sequence: Sequence, path: Seq[int]) -> None:
        """The model keeps its rows; the text is its own state."""
        if sequence.slot not in self._repeating:
            self.model.commit(sequence, path)

    def keep(self, slot: int, source: int, rows: int) -> None:
        """The model keeps what it has."""
        self.model.keep(slot, source, rows)

    def release(self, slot: int) -> None:
        """Forget a slot."""
        self.model.release(slot)

    def close(self) -> None:
        """Free the draft."""
        self.model.close()
