"""Test whether an executor's logits are bitwise equal in steps of many shapes, on fixed random tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .executor import Executor, StepInput

LENGTH, CHUNK = 160, 64  # tokens of a test sequence, and of each step in its first read
READS = ((1, 20), (3, 20), (33, LENGTH), (LENGTH, LENGTH))  # step size, tokens read; the likeliest to differ first
STEPS = (150, 129, 128, 127, 100, 65, 64, 63, 40, 31, 17, 16, 15, 6, 2, 1)  # start rows of the small steps
SIZES = (1, 2, 3, 5, 8)  # nodes of the small steps
Logits = NDArray[np.float32]
Part = tuple[int, int, Logits]  # slot, index of the first token, logits after that token and the following ones


def agree(
    executor: Executor,
    min_nodes: int = 0,
    max_nodes: int = LENGTH,
    every: int = 1,
    several: Sequence[list[int]] | None = None,
) -> Logits | None:
    """Return the first sequence's logits if all tested steps agree bitwise, else None.

    All slots must be free; their contents are overwritten.

    Args:
        executor: The executor to test.
        min_nodes: Smallest step size tested, and smallest number of wanted logits in a small step.
        max_nodes: Largest number of nodes in a step.
        every: Stride through the start rows of the small steps; above 1, only two of READS are repeated:
            the likeliest to differ and the least likely.
        several: Token ids of a sequence for each slot; None: `texts(executor)`.
    """
    several, expected = several or texts(executor), list[Logits]()

    def same(parts: Iterable[Part]) -> bool:
        return all(np.array_equal(got, expected[slot][first : first + len(got)]) for slot, first, got in parts)

    for slot, text in enumerate(several):
        expected.append(read(executor, slot, text, min(CHUNK, max_nodes)))
        if slot == 0 and not same(_reads(executor, text, (min_nodes, max_nodes), READS[:: 1 if every == 1 else 3])):
            return None
    return expected[0] if same(_steps(executor, several, (min_nodes, max_nodes), every)) else None


def texts(executor: Executor, longest: int = LENGTH) -> list[list[int]]:
    """Return a sequence of at most `longest` pseudo-random token ids for each slot, the same in every call."""
    spec, random = executor.spec, np.random.default_rng(20)
    length = min(longest, spec.capacity - CHUNK, spec.max_positions)
    return [random.integers(0, spec.vocab_size, length).tolist() for _ in range(executor.batch_size)]


def read(executor: Executor, slot: int, text: Sequence[int], size: int) -> Logits:
    """Return a sequence's logits, `float32[len(text), V]`, computed in steps of `size` nodes."""
    parts = [executor.step([_input(slot, text, start, size)])[0].copy() for start in range(0, len(text), size)]
    return np.concatenate(parts)


def _reads(
    executor: Executor, text: Sequence[int], nodes: tuple[int, int], reads: Sequence[tuple[int, int]]
) -> Iterator[Part]:
    """Yield the first slot's logits again, from steps of other sizes."""
    for size, length in reads:
        if size >= nodes[0]:
            yield 0, 0, read(executor, 0, text[:length], min(size, nodes[1]))


def _steps(executor: Executor, several: Sequence[Sequence[int]], nodes: tuple[int, int], every: int) -> Iterator[Part]:
    """Yield the logits of small steps in some slots, last start row first: a step destroys the rows after its own."""
    random, sizes = np.random.default_rng(21), [size for size in SIZES if nodes[0] <= size <= nodes[1]]
    for start in [start for start in STEPS if start + max(nodes[0], 1) <= len(several[0])][::every]:
        for _ in sizes:
            for slot in range(len(several)):
                executor.commit(slot, (), start)
            slots = [slot for slot in range(len(several)) if random.random() < 0.75] or [0]
            inputs = [_input(slot, several[slot], start, int(random.choice(sizes))) for slot in slots]
            for given in inputs:
                given.logits = int(random.integers(nodes[0], len(given.tokens) + 1))
            for given, logits in zip(inputs, executor.step(inputs), strict=True):
                yield given.slot, given.start + len(given.tokens) - given.logits, logits


def _input(slot: int, text: Sequence[int], start: int, size: int) -> StepInput:
    """Return a step of a text's tokens from `start` on, with logits for all."""
    tokens = text[start : start + size]
    return StepInput(slot, start, start, tokens, range(start, start + len(tokens)), None, len(tokens))
