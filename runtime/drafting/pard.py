"""PARD (arXiv 2504.18583): a draft model that predicts several tokens in one pass, with masks for those in between."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends.executor import Executor, StepInput

from .model import DraftInput, ModelDrafter


class PardDrafter(ModelDrafter):
    """Grows a tree of any depth in one step: mask j stands for token j after the root, and predicts what follows it.

    A level's candidates are the same below every node of the level above. The masks' rows are not kept.
    """

    def __init__(self, executor: Executor, chunk: int, mask: int, tokens: NDArray[np.int64] | None = None) -> None:
        """`mask`: id of the token that stands for one not known yet."""
        super().__init__(executor, chunk, tokens=tokens)
        self._mask = mask

    def again(self) -> Self:
        """See `ModelDrafter.again`."""
        return type(self)(self.executor, self._chunk, self._mask, self._tokens)

    def _grow(self, growing: list[DraftInput]) -> None:
        """Grow all levels of all texts' trees from one step."""
        for text, rows in zip(growing, self._catch_up(growing) if growing else [], strict=True):
            growth = text.growth
            while not growth.done:
                row = rows[growth.depth]
                growth.grow(*self._children(text, np.repeat(row[None], len(growth.frontier), axis=0)))

    def _behind(self, text: DraftInput) -> int:
        return super()._behind(text) + self._masks(text)

    def _last(self, text: DraftInput) -> StepInput:
        step_input, masks = super()._chain(text, 1), self._masks(text)
        tokens, count = [*step_input.tokens, *[self._mask] * masks], len(step_input.tokens) + masks
        positions = range(step_input.start, step_input.start + count)
        return replace(step_input, tokens=tokens, positions=positions, logits=1 + masks)

    @staticmethod
    def _masks(text: DraftInput) -> int:
        return masks(text.growth.spec.depth)


def masks(levels: int) -> int:
    """Return how many masks stand for the tokens of `levels` levels."""
    return levels - 1
