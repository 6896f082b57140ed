"""EAGLE-3 (arXiv 2503.01840): a head of one layer that drafts from the target's hidden states."""

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
    """Drafts with an EAGLE-3 head.

    Row i of its cache combines the target's hidden state of token i with token i + 1, at position i. So the cache has
    one row fewer than the text has tokens, and its last row predicts what follows the root. Drafted nodes continue from
    the head's own hidden states; once they are accepted, their rows are recomputed from the target's.
    """

    def __init__(
        self, executor: Executor, chunk: int, target: Executor, tokens: NDArray[np.int64] | None = None
    ) -> None:
        super().__init__(executor, chunk, tokens=tokens)
        self.executor: Executor = executor
        self._target = target

    def again(self, overlap: bool = False) -> Self:
        """See `ModelDrafter.again`; never overlaps, as the head cannot draft ahead of the target's hidden states."""
        return type(self)(self.executor, self._chunk, self._target, self._tokens)

    def propose(self, sequences: Seq[Sequence]) -> list[Tree]:
        """Return a tree per sequence; the root alone after a text of one token, which has no hidden state yet."""
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
        above = [growth.rows[growth.pool.parents[node]] for node in growth.frontier]  # −1: the last committed row
        step_input.hidden = self.executor.hidden(text.slot)[step_input.committed + np.array(above)]
        return step_input

    def commit(self, sequence: Sequence, path: Seq[int]) -> None:
        """Forget the drafted rows, which are recomputed; see the class."""
        self._growth.pop(sequence.slot, None)
        self.executor.commit(sequence.slot, (), self.cached[sequence.slot])

    def keep(self, slot: int, source: int, rows: int) -> None:
        """See `Drafter.keep`; the last row is not kept, as it depends on the token after it."""
        super().keep(slot, source, max(rows - 1, 0))
