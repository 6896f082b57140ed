"""The ring of a loop that stays on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from calls import Array, ints, poisoned, struct
from device import HostKernels
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.backends.kernels.abi import Fault, KernelLibrary, Ring
from specbuild.runtime.errors import OptionError

FOR_EVER = 2**64 - 1


class Rounds:
    """A ring of poisoned entries, and what the rounds say."""

    def __init__(self, rounds: int, batch: int, nodes: int, first: int = 0) -> None:
        self.ring = poisoned(rounds, batch, nodes + 3)
        self.round, self.published = (np.full(1, first, dtype=np.uint64) for _ in range(2))
        self.sizes = {"rounds": rounds, "batch": batch, "nodes": nodes}

    def publish(self, kernels: HostKernels, length: Array, emitted: Array, **more: Any) -> None:
        """One round's end."""
        arrays = {"ring": self.ring, "round": self.round, "published": self.published, "length": length}
        arrays |= {"counts": length + 1, "root_position": length * 0 + 40}
        fields = {**arrays, "emitted": emitted, "most": FOR_EVER, **self.sizes} | more
        kernels.launch("publish", struct(kernels, Ring, **fields))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rounds=st.integers(1, 5),
    batch=st.integers(1, 9),
    nodes=st.integers(1, 64),
    first=st.sampled_from([0, 3, 2**32 - 1, 2**63]),
    faults=st.booleans(),
    order=st.integers(0, 3),
)
def test_anything(
    kernels: HostKernels,
    host: KernelLibrary,
    in_order: Callable[..., Any],
    seed: int,
    rounds: int,
    batch: int,
    nodes: int,
    first: int,
    faults: bool,
    order: int,
) -> None:
    rng = np.random.default_rng(seed)
    loop = Rounds(rounds, batch, nodes, first)
    expected = loop.ring.copy()
    for done in range(1, 8):
        length, fault = (ints(rng.integers(0, high, batch)) for high in (nodes + 1, len(Fault)))
        emitted = ints(rng.integers(-1, 1000, (batch, nodes)))
        at = (first + done - 1) % rounds
        expected[at, :, 0], expected[at, :, 1], expected[at, :, 2] = length, fault if faults else 0, length + 1
        expected[at, :, 3:] = emitted
        with in_order(host, order):
            loop.publish(kernels, length, emitted, fault=fault if faults else None)
        assert np.array_equal(loop.ring, expected)
        assert loop.published == loop.round == first + done


@pytest.mark.parametrize(
    ("lengths", "stop", "most", "goes_on"),
    [
        ([0, 2], 0, 9, True),
        ([0, 2], None, 9, True),
        ([0, 0], 0, 9, False),
        ([1, 2], 1, 9, False),
        ([1, 2], 2**31, 9, False),
        ([1, 2], 0, 6, True),
        ([1, 2], 0, 5, False),
        ([1, 2], 0, 0, False),
    ],
)
def test_the_loop_ends(
    host_kernels: HostKernels, lengths: list[int], stop: int | None, most: int, goes_on: bool
) -> None:
    """Round 4 of the loop; on a host the handle is the address of the condition."""
    loop, condition = Rounds(3, 2, 4, first=4), np.full(1, 7, dtype=np.uint32)
    flag = None if stop is None else np.array([stop], dtype=np.uint32)
    said = {"stop": flag, "most": most, "handle": host_kernels.at(condition)}
    loop.publish(host_kernels, ints(lengths), poisoned(2, 4), **said)
    assert condition == (7 if goes_on else 0)
    assert loop.published == 5  # the last round is published too


@pytest.mark.parametrize(
    ("positions", "lengths", "goes_on"),
    [([40, 40], [1, 2], True), ([40, 50], [1, 2], False), ([60, 40], [1, 2], False), ([60, 40], [0, 2], True)],
)
def test_the_loop_ends_with_a_text(
    host_kernels: HostKernels, positions: list[int], lengths: list[int], goes_on: bool
) -> None:
    """Where the last token of any lies at its end or behind it; a text that emits nothing is not looked at."""
    loop, condition = Rounds(3, 2, 4), np.full(1, 7, dtype=np.uint32)
    said = {"handle": host_kernels.at(condition), "root_position": ints(positions), "ends": ints([50, 50])}
    loop.publish(host_kernels, ints(lengths), poisoned(2, 4), **said)
    assert condition == (7 if goes_on else 0)
    assert loop.published == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch 0"),
        ({"nodes": 65}, "a tree of 65 nodes"),
        ({"rounds": 0}, "a ring of 0 rounds"),
        ({"published": None}, "published is null"),
        ({"emitted": None}, "emitted is null"),
        ({"counts": None}, "counts is null"),
        ({"root_position": None}, "root_position is null"),
    ],
)
def test_refused(kernels: HostKernels, change: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Rounds(2, 1, 3).publish(kernels, **{"length": ints([1]), "emitted": poisoned(1, 3)} | change)
