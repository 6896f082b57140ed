"""The ring of a device's rounds: where it begins, what it holds, and who ends it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from device_requests import Made, prompt_of, request_of, run
from host_device import HostQueue

from specbuild.runtime.backends.kernels.abi import KernelLibrary
from specbuild.runtime.decoding.device.ring import HEAD, NEVER, Ring
from specbuild.runtime.errors import ExecutionError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def test_a_loop_ends_with_the_rings_last_entry(host: KernelLibrary, folder: Path) -> None:
    """Of rounds that it has more entries for than are wanted; a slot without a text never ends."""
    made = Made(host, folder, 3, ("target",))
    ring, one = Ring(made.loop.rounds, 8), request_of(prompt_of(0, 5), speculation="off", max_new_tokens=9)
    one.slot = 1
    assert ring.works
    assert ring.begin([one], 5) == 3
    made.target.wait()
    assert ring.published == 3
    assert made.device.array(ring._ends).tolist() == [NEVER, 13, NEVER]
    assert ring.entries(4).shape == (8, 3, HEAD + 4)


def test_an_entry_says_what_became_of_a_round(host: KernelLibrary, folder: Path) -> None:
    made = Made(host, folder, 2, ("target",))
    ring, block = Ring(made.loop.rounds, 4), made.loop.rounds.blocks[4]
    for name, numbers in {"length": [2, 0], "fault": [0, 3], "counts": [4, 1]}.items():
        made.device.array(block.at[name])[:] = numbers
    made.device.array(block.at["emitted"])[:] = [[7, 9, -1, -1], [-1] * 4]
    at = ring.begin([], 3)
    ring.publish(4, 0)
    made.target.wait()
    assert ring.published == at + 1
    assert ring.entries(4)[at].tolist() == [[2, 0, 4, 7, 9, -1, -1], [0, 3, 1, -1, -1, -1, -1]]


@pytest.mark.parametrize("tree", ["off", "chain:3"])
def test_the_device_ends_with_a_text(host: KernelLibrary, folder: Path, tree: str) -> None:
    """However far ahead it is: no round is run for a sequence that its limit has ended."""
    made = Made(host, folder, 1, ("target", "target"), rounds=32)
    made.device.ahead = 99
    (done,) = run(made.loop, [request_of(prompt_of(3, 6), speculation=tree, max_new_tokens=23)])
    assert done.finish_reason == "length"
    assert made.device.turns == made.loop.stats.rounds - 2  # all but the prompt's and the first of its kind


def test_a_device_without_the_kernel(host: KernelLibrary, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(host, folder, 1, ("target",))

    def fail(self: HostQueue, name: str, *more: object) -> None:
        raise ExecutionError(f"no kernel {name}")

    monkeypatch.setattr(HostQueue, "launch", fail)
    assert not Ring(made.loop.rounds, 4).works
    assert made.loop.notes == ["no kernel publish"]
    assert not np.any(made.loop.rounds.blocks[4].host["counts"])
