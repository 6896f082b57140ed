"""Test whether a model's steps on a device agree bitwise when they all have the same shape."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends.agreement import LENGTH, agree, read, texts
from specbuild.runtime.backends.exactness import ExactnessClass
from specbuild.runtime.backends.executor import StepInput

from .executor import StandardExecutor

FEW = 4  # test every 4th start row only: here a step's shape does not depend on what is in it
_log = logging.getLogger(__name__)


def find(executor: StandardExecutor, nodes: int) -> ExactnessClass | None:
    """Find the class of steps that hold `nodes` nodes of each sequence, and keep the executor to it.

    Return None, with a warning, if even these steps do not agree. All slots must be free; their contents are
    overwritten.
    """
    step = executor.bucket(nodes)
    exactness = ExactnessClass(executor.batch_size * step, step)
    executor.keep_to(exactness)
    with _texts(executor) as several:
        if (step == 1 or agree(executor, 2, step, FEW, several) is not None) and _read_alike(executor, several[0]):
            executor.keep_to(replace(exactness, digest=_digest(executor, several[0], step)))
            return executor.exactness
    executor.keep_to(None)
    _log.warning("steps of one shape do not agree in every bit here: near-ties may be decided otherwise")
    return None


@contextmanager
def _texts(executor: StandardExecutor) -> Iterator[list[list[int]]]:
    """Yield a sequence for each slot; meanwhile the slots have pages for them."""
    pages, slots = executor.model.pages, range(executor.batch_size)
    if pages is None:
        yield texts(executor)
        return
    several = texts(executor, min(LENGTH, pages.count // len(slots) * pages.rows))
    for slot in slots:
        pages.take(slot, slot, 0, len(several[slot]))
    pages.update(executor.stream)
    try:
        yield several
    finally:
        for slot in slots:
            pages.release(slot, 0)
        pages.update(executor.stream)


def _read_alike(executor: StandardExecutor, text: list[int]) -> bool:
    """Return whether a sequence's last logits are the same when it is prefilled at once and in pieces."""
    pieces = (len(text), 7, executor.model.buckets[-1] + 3)
    return len({_last(executor, text, min(size, executor.model.chunk)).tobytes() for size in pieces}) == 1


def _digest(executor: StandardExecutor, text: list[int], step: int) -> str:
    """Return the hexadecimal sha256 of the logits after a prefilled sequence, and of a few steps of `step` nodes."""
    read_at_once = _last(executor, text, executor.model.chunk)
    return hashlib.sha256(read_at_once.tobytes() + read(executor, 0, text[: FEW * step], step).tobytes()).hexdigest()


def _last(executor: StandardExecutor, text: list[int], size: int) -> NDArray[np.float32]:
    """Return the logits after a sequence that is prefilled in pieces of `size` tokens."""
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        (last,) = executor.step([StepInput(0, start, start, piece, range(start, start + len(piece)), None, 1)])
    return last.copy()
