"""Whether the steps of an executor agree in every bit: texts are read in steps of many shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .executor import Executor, StepInput

LENGTH, CHUNK = 160, 64  # tokens of the text that is read in many ways, and of each step when it is read first
READS = ((1, 20), (3, 20), (33, LENGTH), (LENGTH, LENGTH))  # nodes, how far; likeliest to differ first
STEPS = (150, 129, 128, 127, 100, 65, 64, 63, 40, 31, 17, 16, 15, 6, 2, 1)  # where steps of few nodes begin
SIZES = (1, 2, 3, 5, 8)
Logits = NDArray[np.float32]
Part = tuple[int, int, Logits]  # of a slot's logits, those after the tokens from one on


def agree(
    executor: Executor, least: int = 0, most: int = LENGTH, every: int = 1, several: Sequence[list[int]] | None = None
) -> Logits | None:
    """The first text's logits where all steps agree of at most `most` nodes, `least` of them wanted at least.

    None where any differs. Its slots must be free, and hold nothing that counts afterwards. `every`: of the places in
    the texts; if not all, the likeliest and the least likely reads alone. `several`: these texts, one for each slot.
    """
    several, expected = several or texts(executor), list[Logits]()

    def same(parts: Iterable[Part]) -> bool:
        return all(np.array_equal(got, expected[slot][first : first + len(got)]) for slot, first, got in parts)

    for slot, text in enumerate(several):
        expected.append(read(executor, slot, text, min(CHUNK, most)))
        if slot == 0 and not same(_reads(executor, text, (least, most), READS[:: 1 if every == 1 else 3])):
            return None
    return expected[0] if same(_steps(executor, several, (least, most), every)) else None


def texts(executor: Executor, longest: int = LENGTH) -> list[list[int]]:
    """A text of arbitrary tokens for each slot, always the same."""
    spec, random = executor.spec, np.random.default_rng(20)
    length = min(longest, spec.capacity - CHUNK, spec.max_positions)
    return [random.integers(0, spec.vocab_size, length).tolist() for _ in range(executor.batch_size)]


def read(executor: Executor, slot: int, text: Sequence[int], size: int) -> Logits:
    """A text's logits, in steps of so many nodes."""
    parts = [executor.step([_input(slot, text, start, size)])[0].copy() for start in range(0, len(text), size)]
    return np.concatenate(parts)


def _reads(
    executor: Executor, text: Sequence[int], nodes: tuple[int, int], reads: Sequence[tuple[int, int]]
) -> Iterator[Part]:
    """The first slot's text again, in steps of other sizes."""
    for size, length in reads:
        if size >= nodes[0]:
            yield 0, 0, read(executor, 0, text[:length], min(size, nodes[1]))


def _steps(executor: Executor, several: Sequence[Sequence[int]], nodes: tuple[int, int], every: int) -> Iterator[Part]:
    """Steps of few nodes in some slots, from the last on: a step leaves nothing behind its nodes as it was."""
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
    tokens = text[start : start + size]
    return StepInput(slot, start, start, tokens, range(start, start + len(tokens)), None, len(tokens))
