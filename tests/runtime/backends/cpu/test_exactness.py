"""Exactness classes on a CPU: the one that is found holds for any shape, batch and history, and none is made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specbuild.runtime.backends.cpu import exactness
from specbuild.runtime.backends.cpu.executor import OrtExecutor
from specbuild.runtime.backends.exactness import CANDIDATES, ExactnessClass
from specbuild.runtime.backends.executor import StepInput

Load = Callable[[str, int], OrtExecutor]
LENGTH = 300


@pytest.fixture(scope="module")
def reference(load: Load) -> tuple[list[int], NDArray[np.float32]]:
    """A text, and its logits by a graph for one sequence in steps of 64."""
    executor = load("target", 1)
    assert exactness.find(executor) in CANDIDATES
    text = np.random.default_rng(4).integers(0, executor.spec.vocab_size, LENGTH).tolist()
    return text, read(executor, text, 0, [64])


@pytest.fixture(scope="module", params=[1, 4])
def executor(load: Load, request: pytest.FixtureRequest) -> OrtExecutor:
    made = load("target", request.param)
    assert exactness.find(made) is not None
    return made


def chain(slot: int, text: Sequence[int], start: int, size: int) -> StepInput:
    tokens = list(text[start : start + size])
    return StepInput(slot, start, start, tokens, range(start, start + len(tokens)), None, len(tokens))


def read(executor: OrtExecutor, text: Sequence[int], slot: int, sizes: Sequence[int]) -> NDArray[np.float32]:
    rows, start = [], 0
    while start < len(text):
        given_input = chain(slot, text, start, sizes[len(rows) % len(sizes)])
        rows.append(executor.step([given_input])[0].copy())
        start += len(given_input.tokens)
        executor.commit(slot, (), start)
    return np.concatenate(rows)


@pytest.mark.slow(but=("1",))
@settings(deadline=None, max_examples=12)
@given(st.data())
def test_logits_are_those_of_any_other_history(
    executor: OrtExecutor, reference: tuple[list[int], NDArray[np.float32]], data: st.DataObject
) -> None:
    """Each slot reads the text in steps of its own, beside others or alone, some a tree's whose trunk is the text."""
    text, expected = reference
    done = dict.fromkeys(range(executor.batch_size), 0)
    for slot in done:
        executor.commit(slot, (), 0)
    length = data.draw(st.integers(2, LENGTH))
    while any(at < length for at in done.values()):
        left = [slot for slot, at in done.items() if at < length]
        inputs = []
        for slot in data.draw(st.sets(st.sampled_from(left), min_size=1)):
            size = data.draw(st.sampled_from([1, 1, 2, 3, 5, 17, 64, 256]))
            inputs.append(chain(slot, text[:length], done[slot], size))
        beside = data.draw(st.integers(0, 3))  # nodes of a side branch
        for each in inputs:
            if beside and len(each.tokens) + beside < 60:
                branch_off(each, beside)
        for each, logits in zip(inputs, executor.step(inputs), strict=True):
            count = len(each.tokens) - (beside if each.visible is not None else 0)
            assert np.array_equal(logits[:count], expected[each.start : each.start + count])
            done[each.slot] += count
            executor.commit(each.slot, (), done[each.slot])


def branch_off(given_input: StepInput, nodes: int) -> None:
    """Add other nodes beside the last ones of a chain."""
    count, start = len(given_input.tokens), given_input.start
    given_input.tokens = [*given_input.tokens, *range(nodes)]
    given_input.positions = [*given_input.positions, *range(start + count, start + count + nodes)]
    given_input.visible = np.tri(count + nodes, dtype=np.bool_)
    given_input.visible[count:, count - 1 : count] = False
    given_input.logits += nodes


def test_graphs_of_all_sizes_compute_the_same_bits(executor: OrtExecutor, load: Load) -> None:
    alone = load("target", 1)
    found = exactness.find(alone)
    assert found is not None
    assert executor.exactness is not None
    assert executor.exactness.digest == found.digest
    assert len(found.digest) == 64


class Planted(OrtExecutor):
    """Adds to every logit of a step a number that depends on its rows, each sequence's in attention, and its end."""

    off: Callable[[int, int, int], float]

    def step(self, inputs: Sequence[StepInput]) -> list[NDArray[np.float32]]:
        logits = super().step(inputs)
        shape = self._shape(self._lanes(inputs))
        total = self.exactness.filled(sum(count for _, count, _ in shape)) if self.exactness else 0
        for each, rows in zip(inputs, logits, strict=True):
            rows += 0.25 * self.off(total, shape[inputs[0].slot][0], each.start + len(each.tokens))
        return logits


def plant(made: Any, off: Callable[[int, int, int], float]) -> Any:
    """The executor, which computes otherwise from now on."""
    made.__class__, made.off = Planted, off
    return made


@pytest.mark.parametrize(
    ("off", "found"),
    [
        (lambda total, each, end: each % 2, ExactnessClass(1, 2)),
        (lambda total, each, end: total % 2, ExactnessClass(2, 2)),
        (lambda total, each, end: total % 4, ExactnessClass(4, 4)),
        (lambda total, each, end: total > 8, None),
    ],
)
def test_what_is_planted_is_found(load: Load, off: Any, found: ExactnessClass | None) -> None:
    made = plant(load("target", 1), off)
    assert exactness.find(made) == found == made.exactness


@pytest.mark.slow(only=("319-4",))
@pytest.mark.parametrize(("first", "batch_size"), [(200, 1), (319, 4), pytest.param(900, 1, marks=pytest.mark.nightly)])
def test_what_is_planted_far_into_a_text_is_found(load: Load, first: int, batch_size: int) -> None:
    """A step that ends in another tile of 64 computes otherwise from a row on: no class holds there."""
    made = plant(load("target", batch_size), lambda total, each, end: (end >= first) * (end // 64))
    assert exactness.find(made) is None


def test_a_machine_is_more_than_its_name(load: Load) -> None:
    found = exactness.machine_of(load("target", 1))
    assert found.keys() == {"processor", "threads", "onnxruntime", "vector_units", "flash_attention"}
    cpuinfo = Path("/proc/cpuinfo")
    flags = {*cpuinfo.read_text(encoding="utf-8").split()} if cpuinfo.exists() else set()
    assert {"avx2", "fma", "fpu"}.intersection(str(found["vector_units"]).split()) == {"avx2", "fma"} & flags
