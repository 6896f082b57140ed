"""What a device knows of its sequences is what the host wrote, and nothing is sent or captured twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from device_requests import prompt_of, request_of
from host_device import HostDevice
from tiny_models import VOCAB

from specbuild.runtime.decoding.device.state import (
    Graphs,
    Slots,
)
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.tree import TreeSpec


@pytest.fixture
def device() -> HostDevice:
    return HostDevice()


@pytest.fixture
def stream(device: HostDevice) -> int:
    return device.stream()


def decoding(slot: int, **fields: Any) -> Sequence:
    """A sequence in a slot, whose prompt of five tokens is in the cache but for the last one."""
    sequence = request_of(prompt_of(slot, 5), seed=100 + slot, **{"speculation": "off"} | fields)
    sequence.slot, sequence.cached = slot, 4
    return sequence


def test_a_first_use_enqueues_and_the_second_captures_for_all_that_follow(device: HostDevice, stream: int) -> None:
    """What a first use loads or allocates may be in no capture."""
    executor: Any = SimpleNamespace(device=device, stream=stream, model=SimpleNamespace(capturable=True))
    executor.timed = lambda enqueue: enqueue()
    made, ran, called = Graphs(executor), list[int](), list[int]()

    def enqueue(key: int) -> None:
        called.append(key)
        device.run(stream, lambda: ran.append(key))

    for key, captured in ((1, 0), (2, 0), (1, 1), (1, 1), (2, 2), (1, 2)):
        made.run(key, lambda key=key: enqueue(key))  # type: ignore[misc]
        assert device.captured == captured
    device.wait(stream)
    assert ran == [1, 2, 1, 1, 2, 1]
    assert called == [1, 2, 1, 2], "once as it is, once for the graph"
    made.clear()
    for captured in (2, 3):
        made.run(1, lambda: enqueue(1))
        assert device.captured == captured


def test_what_is_known_is_not_sent_again(device: HostDevice, stream: int) -> None:
    """From a sequence's second round on the device's own state is newer than the host's."""
    slots, sequence, spec = Slots(device, 2, VOCAB), decoding(1), TreeSpec.parse("chain:2")
    slots.update([(sequence, spec)], stream)
    device.wait(stream)
    device.array(slots.at["roots"])[:] = 77
    slots.update([(sequence, spec)], stream)
    device.wait(stream)
    assert (device.array(slots.at["roots"]) == 77).all()
    slots.update([(sequence, None)], stream)  # it drafts no more
    device.wait(stream)
    assert not device.array(slots.at["growths"]).any()
    assert device.array(slots.at["roots"])[1] == sequence.tokens[-1]
