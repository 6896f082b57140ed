"""EAGLE-3 (arXiv 2503.01840): a head of one layer that drafts from the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np

from specbuild.runtime.backends.executor import Executor, StepInput
from specbuild.runtime.speculation.tree_growth import Growth

from .model import Draft, ModelDrafter


class EagleDrafter(ModelDrafter):
    """Drafts with an EAGLE-3 head.

    Row i of its cache combines the target's hidden state of token i with token i + 1, at position i. So the cache has
    one row fewer than the text has tokens, and its last row predicts what follows the root. Drafted nodes continue from
    the head's own hidden states; once they are accepted, their rows are recomputed from the target's.
    """

    def __init__(self, executor: Executor, chunk: int, target: Executor, **options: Any) -> None:
        super().__init__(executor, chunk, **options)
        self._target = target

    def grow(self, drafts: Seq[Draft]) -> None:
        """See `ModelDrafter.grow`; a text of one token has no hidden state yet, and gets the root alone."""
        super().grow([draft for draft in drafts if len(draft.sequence.tokens) > 1])

    def _behind(self, draft: Draft) -> int:
        return super()._behind(draft) - 1

    def _chain(self, draft: Draft, logits: int) -> StepInput:
        slot, tokens = draft.sequence.slot, draft.sequence.tokens
        start = self.cached[slot]
        stop = self.cached[slot] = min(len(tokens) - 1, start + self._chunk)
        hidden = self._target.hidden(slot)[start:stop]
        return StepInput(slot, start, start, tokens[start + 1 : stop + 1], range(start, stop), None, logits, hidden)

    def _level(self, draft: Draft) -> StepInput:
        step_input, growth = super()._level(draft), draft.growth
        parents = [growth.pool.parents[node] for node in growth.frontier]
        above = [growth.rows.get(parent, -1) for parent in parents]  # −1: the last committed row
        hidden = self.executor.hidden(step_input.slot)[step_input.committed + np.array(above)]
        return replace(step_input, hidden=hidden)

    def commit(self, slot: int, growth: Growth, path: Seq[int]) -> None:
        """Forget the drafted rows, which are recomputed; see the class."""
        self.release(slot)

    def keep(self, slot: int, source: int, rows: int) -> None:
        """See `ModelDrafter.keep`; the last row is not kept, as it depends on the token after it."""
        super().keep(slot, source, max(rows - 1, 0))
