"""EAGLE-3 (arXiv 2503.01840): a head of one layer that drafts from the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Self

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends.executor import Executor, StepInput
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.tree import Tree, TreeSpec
from specbuild.runtime.speculation.tree_growth import Growth, GrowthRule

from .model import DraftInput, ModelDrafter


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

    def again(self) -> Self:
        """See `ModelDrafter.again`."""
        return type(self)(self.executor, self._chunk, self._target, self._tokens)

    def grow(self, asked: Seq[tuple[Sequence, TreeSpec, GrowthRule | None]]) -> list[Growth]:
        """See `ModelDrafter.grow`; a text of one token has no hidden state yet, and gets the root alone."""
        grown = iter(super().grow([each for each in asked if len(each[0].tokens) > 1]))
        return [
            next(grown) if len(sequence.tokens) > 1 else Growth(shape, Tree(sequence.tokens[-1:]))
            for sequence, shape, _ in asked
        ]

    def _behind(self, text: DraftInput) -> int:
        return len(text.tokens) - 1 - self.cached[text.slot]

    def _chain(self, text: DraftInput, logits: int) -> StepInput:
        start = self.cached[text.slot]
        stop = min(len(text.tokens) - 1, start + self._chunk)
        self.cached[text.slot] = stop
        hidden = self._target.hidden(text.slot)[start:stop]
        return StepInput(
            text.slot, start, start, text.tokens[start + 1 : stop + 1], range(start, stop), None, logits, hidden
        )

    def _level(self, text: DraftInput) -> StepInput:
        step_input, growth = super()._level(text), text.growth
        above = [growth.rows[growth.pool.parents[node]] for node in growth.frontier]  # −1: the last committed row
        step_input.hidden = self.executor.hidden(text.slot)[step_input.committed + np.array(above)]
        return step_input

    def commit(self, sequence: Sequence, path: Seq[int]) -> None:
        """Forget the drafted rows, which are recomputed; see the class."""
        self._growth.pop(sequence.slot, None)
        self.executor.commit(sequence.slot, (), self.cached[sequence.slot])

    def keep(self, slot: int, source: int, rows: int) -> None:
        """See `KeepsRows.keep`; the last row is not kept, as it depends on the token after it."""
        super().keep(slot, source, max(rows - 1, 0))
