"""PARD (arXiv 2504.18583): a draft model that predicts several tokens in one pass, with masks for those in between."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np

from specbuild.runtime.backends.executor import Executor, StepInput

from .model import Draft, ModelDrafter


class PardDrafter(ModelDrafter):
    """Grows a tree of any depth in one step: mask j stands for token j after the root, and predicts what follows it.

    A level's candidates are the same below every node of the level above. The masks' rows are not kept.
    """

    def __init__(self, executor: Executor, chunk: int, mask: int, **options: Any) -> None:
        """`mask`: id of the token that stands for one not known yet."""
        super().__init__(executor, chunk, **options)
        self._mask = mask

    def _grow(self, drafts: Seq[Draft]) -> None:
        """Grow all levels of all trees from one step."""
        for draft, rows in zip(drafts, self._catch_up(drafts), strict=True):
            growth = draft.growth
            while not growth.done:
                row = rows[growth.depth]
                growth.grow(*self._children(draft, np.repeat(row[None], len(growth.frontier), axis=0)))

    def _behind(self, draft: Draft) -> int:
        return super()._behind(draft) + draft.growth.spec.depth - 1

    def _chain(self, draft: Draft, logits: int) -> StepInput:
        step_input, count = super()._chain(draft, logits), draft.growth.spec.depth - 1
        if not logits:
            return step_input
        tokens = [*step_input.tokens, *[self._mask] * count]
        positions = range(step_input.start, step_input.start + len(tokens))
        return replace(step_input, tokens=tokens, positions=positions, logits=1 + count)
