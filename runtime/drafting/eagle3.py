"""EAGLE-3 (arXiv 2503.01840): a head of one layer that drafts from the target's own hidden states."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Self

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends.executor import Executor, StepInput
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.tree import Tree

from .model import ModelDrafter, Text


class EagleDrafter(ModelDrafter):
    """Row i of its cache pairs what the target made of token i with token i + 1, at position i.

    So it has a row less than the text has tokens, and its last row says what follows the root. Drafted nodes go on from
    the head's own hidden states; once they are accepted, the rows are computed anew from the target's.
    """

    def __init__(
        self, executor: Executor, chunk: int, target: Executor, tokens: NDArray[np.int64] | None = None
    ) -> None:
        super().__init__(executor, chunk, tokens=tokens)
        self.executor: Executor = executor
        self._target = target

    def again(self, overlap: bool = False) -> Self:
        """See `ModelDrafter.again`. It cannot draft ahead of what the target has computed."""
        return type(self)(self.executor, self._chunk, self._target, self._tokens)

    def propose(self, sequences: Seq[Sequence]) -> list[Tree]:
        """A tree per sequence, the root alone after a text of one token: the target has said nothing yet."""
        drafted = iter(super().propose([s for s in sequences if len(s.tokens) > 1]))
        return [next(drafted) if len(s.tokens) > 1 else Tree([s.tokens[-1]]) for s in sequences]

    def _behind(self, text: Text) -> int:
        return len(text.tokens) - 1 - self.cached[text.slot]

    def _chain(self, text: Text, logits: int) -> StepInput:
        start = self.cached[text.slot]
        stop = min(len(text.tokens) - 1, start + self._chunk)
        self.cached[text.slot] = stop
        hidden = self._target.hidden(text.slot)[start:stop]
        return StepInput(
            text.slot, start, start, text.tokens[start + 1 : stop + 1], range(start, stop), None, logits, hidden
        )

    def _level(self, text: Text) -> StepInput:
        step_input, growth = super()._level(text), text.growth
        above = [growth.rows[growth.pool.parents[node]] for node in growth.frontier]  # −1: the root, the row before
        step_input.hidden = self.executor.hidden(text.slot)[step_input.committed + np.array(above)]
        return step_input

    def commit(self, sequence: Sequence, path: Seq[int]) -> None:
        """Forget the drafted rows; see the class."""
        self._growth.pop(sequence.slot, None)
        self.executor.commit(sequence.slot, (), self.cached[sequence.slot])

    def keep(self, slot: int, source: int, rows: int) -> None:
        """Keep what the cache has of these rows; the last one's depends on the token after it."""
        super().keep(slot, source, max(rows - 1, 0))
