"""Finds out whether the steps of a model on a device agree in every bit, where they have always the same shape."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends.agreement import agree, texts
from specbuild.runtime.backends.exactness import ExactnessClass
from specbuild.runtime.backends.executor import StepInput

from .executor import StandardExecutor

FEW = 4  # of the places in a text: here the shape does not depend on what a step has
_log = logging.getLogger(__name__)


def find(executor: StandardExecutor, nodes: int) -> ExactnessClass | None:
    """The class of steps that hold `nodes` nodes of each sequence, which the executor is kept to from then on.

    None, and a warning, where not even they agree. Its slots must be free, and hold nothing that counts afterwards.
    """
    step = executor.bucket(nodes)
    found = ExactnessClass(executor.batch_size * step, step)
    executor.keep_to(found)
    if (step == 1 or agree(executor, 2, step, FEW)) and _texts_agree(executor):
        return found
    executor.keep_to(None)
    _log.warning("steps of one shape do not agree in every bit here: near-ties may be decided otherwise")
    return None


def _texts_agree(executor: StandardExecutor) -> bool:
    """Whether a text's last logits are the same, read at once and in pieces."""
    text = texts(executor)[0]
    pieces = (len(text), 7, executor.model.buckets[-1] + 3)
    return len({_last(executor, text, min(size, executor.model.chunk)).tobytes() for size in pieces}) == 1


def _last(executor: StandardExecutor, text: list[int], size: int) -> NDArray[np.float32]:
    """The logits after a text that is read in pieces of `size` tokens."""
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        given = StepInput(0, start, start, piece, range(start, start + len(piece)), None, 1)
        (last,) = executor.step([given])
    return last.copy()
