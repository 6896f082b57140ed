"""Measures a bundle's exactness on this machine: which steps agree in every bit, and how far side branches deviate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specbuild.runtime import Bundle, Engine
from specbuild.runtime.backends.cpu.cores import cores
from specbuild.runtime.backends.cpu.exactness import find, machine_of
from specbuild.runtime.backends.cpu.load import load_model
from specbuild.runtime.backends.exactness import MAX_ROWS, ExactnessClass
from specbuild.runtime.backends.executor import StepInput
from specbuild.runtime.bundle.manifest import ExactnessRecord
from specbuild.runtime.decoding.loop import Loop

HIDDEN = (1, 2, 5, 14, 30)  # how many rows lie before a side branch that does not see them
BRANCH = 4  # nodes of the side branch
STEPS = 4  # steps for each text and number of hidden rows, about


def record(folder: Path) -> ExactnessRecord:
    """Find the exactness class of the target's graphs on this machine; `rows` is 0 if they have none in common."""
    bundle, threads = Bundle.open(folder), cores()
    sizes = sorted(map(int, bundle.manifest.models["target"].graphs))
    found = list[ExactnessClass | None]()
    for size in reversed(sizes):
        executor = load_model(bundle, "target", size, threads)
        found.append(find(executor, found[-1] if found else None))
        machine = machine_of(executor)
        executor.close()
    classes = [each for each in found if each]
    bits = {each.digest for each in classes}
    if len(classes) < len(found) or len(bits) > 1:
        return ExactnessRecord(machine, 0, 0, "")
    rows, least = max(each.rows for each in classes), max(each.sequence_rows for each in classes)
    return ExactnessRecord(machine, rows, least, bits.pop())


def branch_rounding(folder: Path, texts: Sequence[Sequence[int]]) -> float:
    """Return the largest difference between the logits of side branches and those of plain decoding on these texts."""
    with Engine.load(folder, prefix_caching=False) as engine, engine.scheduler.exclusive() as loop:
        return max(_text_rounding(loop, list(text)) for text in texts)


def _text_rounding(loop: Loop, text: list[int]) -> float:
    expected = loop.logits(text, len(text))
    largest, last = 0.0, len(text) - BRANCH - 1
    with loop.borrowed(len(text)):
        for start in range(last, -1, -max(1, last // STEPS)):  # backwards: a step overwrites all rows after its root
            branch = range(start + 1, start + 1 + BRANCH)
            spec = loop.target.spec
            room = min(spec.max_nodes, spec.capacity - start - MAX_ROWS) - 1 - BRANCH  # a step may be padded
            for hidden in (count for count in HIDDEN if count <= room):
                got = loop.target.step([_beside(text, start, hidden)])[0]
                largest = max(largest, float(np.abs(got - expected[branch]).max()))
    return largest


def _beside(text: list[int], start: int, hidden: int) -> StepInput:
    """Return a step of a root, a chain of `hidden` other tokens, and a side branch with the text's own next tokens."""
    tokens = [text[start], *(text[i % len(text)] for i in range(hidden)), *text[start + 1 : start + 1 + BRANCH]]
    depths = [0, *range(1, hidden + 1), *range(1, BRANCH + 1)]
    visible = np.tri(len(tokens), dtype=np.bool_)
    visible[hidden + 1 :, 1 : hidden + 1] = False
    return StepInput(0, start, start, tokens, [start + depth for depth in depths], visible, BRANCH)
