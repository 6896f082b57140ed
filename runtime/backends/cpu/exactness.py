"""Finds the exactness class of a model on this machine: the cheapest whose steps agree in every bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends.exactness import CANDIDATES, ExactnessClass
from specbuild.runtime.backends.executor import StepInput

from .executor import OrtExecutor

LENGTH, CHUNK = 160, 64  # tokens of the text that is read in many ways, and of each step when it is read first
READS = ((LENGTH, LENGTH), (33, LENGTH), (1, 20), (3, 20))  # nodes of a step, and how far
STEPS = (150, 129, 128, 127, 100, 65, 64, 63, 40, 31, 17, 16, 15, 6, 2, 1)  # where steps of few nodes begin
SIZES = (1, 2, 3, 5, 8)
_CPUINFO = Path("/proc/cpuinfo")
_VECTOR_UNITS = ("amx", "avx", "fma", "sse4", "asimd", "sve", "sme", "i8mm", "bf16", "fphp")
Logits = NDArray[np.float32]
Part = tuple[int, int, Logits]  # of a slot's logits, those after the tokens from one on


def find(executor: OrtExecutor) -> ExactnessClass | None:
    """The class of an executor, which is padded to it from then on; None where no candidate holds.

    Its slots must be free, and hold nothing that counts afterwards. It takes the time of about 1,000 tokens.
    """
    found = next((each for each in CANDIDATES if _holds(executor, each)), None)
    executor.keep_to(found)
    return found


def machine_of(executor: OrtExecutor) -> dict[str, str | int]:
    """What the class and the bits depend on: processor, vector units, threads, library."""
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.exists() else []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    units = " ".join(sorted(flag for flag in flags if flag.startswith(_VECTOR_UNITS)))
    return {**executor.identity, "vector_units": units}


def digest(executor: OrtExecutor) -> str:
    """The hash of an executor's logits of a text, in hexadecimal: machines of one digest compute the same bits."""
    return hashlib.sha256(_read(executor, 0, _texts(executor)[0], CHUNK).tobytes()).hexdigest()


def _holds(executor: OrtExecutor, candidate: ExactnessClass) -> bool:
    executor.keep_to(candidate)
    texts = _texts(executor)
    expected = [_read(executor, slot, text, CHUNK) for slot, text in enumerate(texts)]
    others = (part for parts in (_steps(executor, texts), _reads(executor, texts[0])) for part in parts)
    return all(np.array_equal(got, expected[slot][first : first + len(got)]) for slot, first, got in others)


def _texts(executor: OrtExecutor) -> list[list[int]]:
    """A text of arbitrary tokens for each slot, always the same."""
    spec, random = executor.spec, np.random.default_rng(20)
    length = min(LENGTH, spec.capacity - CHUNK, spec.max_positions)
    return [random.integers(0, spec.vocab_size, length).tolist() for _ in range(executor.batch_size)]


def _read(executor: OrtExecutor, slot: int, text: Sequence[int], size: int) -> Logits:
    parts = [executor.step([_input(slot, text, start, size)])[0].copy() for start in range(0, len(text), size)]
    return np.concatenate(parts)


def _reads(executor: OrtExecutor, text: Sequence[int]) -> Iterator[Part]:
    """The first slot's text again, in steps of other sizes."""
    for size, length in READS:
        yield 0, 0, _read(executor, 0, text[:length], size)


def _steps(executor: OrtExecutor, texts: Sequence[Sequence[int]]) -> Iterator[Part]:
    """Steps of few nodes in some slots, from the last on: a step leaves nothing behind its nodes as it was."""
    random = np.random.default_rng(21)
    for start in (start for start in STEPS if start < len(texts[0])):
        for _ in SIZES:
            for slot in range(len(texts)):
                executor.commit(slot, (), start)
            slots = [slot for slot in range(len(texts)) if random.random() < 0.75] or [0]
            inputs = [_input(slot, texts[slot], start, int(random.choice(SIZES))) for slot in slots]
            for given in inputs:
                given.logits = int(random.integers(0, len(given.tokens) + 1))
            for given, logits in zip(inputs, executor.step(inputs), strict=True):
                yield given.slot, given.start + len(given.tokens) - given.logits, logits


def _input(slot: int, text: Sequence[int], start: int, size: int) -> StepInput:
    tokens = text[start : start + size]
    return StepInput(slot, start, start, tokens, range(start, start + len(tokens)), None, len(tokens))
