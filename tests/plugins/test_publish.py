"""The ring of a loop that stays on the device."""

import numpy as np
import pytest
from calls import ints, poisoned, struct
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.backends.kernels.abi import Fault, Ring

FOR_EVER = 2**64 - 1


class Rounds:
    """A ring of poisoned entries, and what the rounds say."""

    def __init__(self, rounds, batch, nodes, first=0):
        self.ring = poisoned(rounds, batch, nodes + 3)
        self.round, self.published = (np.full(1, first, dtype=np.uint64) for _ in range(2))
        self.sizes = {"rounds": rounds, "batch": batch, "nodes": nodes}

    def publish(self, kernels, length, emitted, **more):
        """One round's end."""
        arrays = {"ring": self.ring, "round": self.round, "published": self.published, "length": length}
        arrays |= {"counts": length + 1, "root_position": length * 0 + 40}
        fields = {**arrays, "emitted": emitted, "most": FOR_EVER, **self.sizes} | more
        kernels.launch("publish", struct(kernels, Ring, **fields))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    rounds=st.integers(1, 5),
    batch=st.integers(1, 9),
    nodes=st.integers(1, 64),
    first=st.sampled_from([0, 3, 2**32 - 1, 2**63]),
    faults=st.booleans(),
    order=st.integers(0, 3),
)
def test_anything(kernels, host, in_order, seed, rounds, batch, nodes, first, faults, order):
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
    ("change", "goes_on"),
    [
        ({}, True),
        ({"stop": None, "ends": None}, True),
        *(({"stop": np.array([value], dtype=np.uint32)}, False) for value in (1, 2**31)),
        *(({"most": most}, most == 6) for most in (0, 5, 6)),
        ({"length": ints([0, 0])}, False),  # nobody emits
        *(({"root_position": ints(each)}, False) for each in ([40, 50], [60, 40])),  # at a text's end, or behind it
        ({"root_position": ints([60, 40]), "length": ints([0, 2])}, True),  # who emits nothing is not looked at
    ],
)
def test_the_loop_ends(host_kernels, change, goes_on):
    """Round 4 of the loop; on a host the handle is the address of the condition."""
    loop, condition = Rounds(3, 2, 4, first=4), np.full(1, 7, dtype=np.uint32)
    said = {
        "stop": np.zeros(1, dtype=np.uint32),
        "most": 9,
        "handle": host_kernels.at(condition),
        "length": ints([1, 2]),
    }
    said |= {"root_position": ints([40, 40]), "ends": ints([50, 50])} | change
    loop.publish(host_kernels, emitted=poisoned(2, 4), **said)
    assert condition == (7 if goes_on else 0)
    assert loop.published == 5, "the last round is published too"
