"""What a device knows of its sequences is what the host wrote, and nothing is sent twice."""

import pytest
from device_requests import prompt_of, request_of
from host_device import HostDevice
from tiny_models import VOCAB

from specbuild.runtime.decoding.device.slots import Slots
from specbuild.runtime.speculation.proposal import Proposal
from specbuild.runtime.speculation.tree import Tree, TreeSpec


@pytest.fixture
def device():
    return HostDevice()


@pytest.fixture
def stream(device):
    return device.stream()


def decoding(slot, **fields):
    """A sequence in a slot, whose prompt of five tokens is in the cache but for the last one."""
    sequence = request_of(prompt_of(slot, 5), seed=100 + slot, **{"speculation": "off"} | fields)
    sequence.slot, sequence.cached = slot, 4
    return sequence


def test_what_is_known_is_not_sent_again(device, stream):
    """From a sequence's second round on the device's own state is newer than the host's."""
    slots, sequence = Slots(device, 2, VOCAB), decoding(1)
    tree = Tree(sequence.tokens[-1:])
    drafted = Proposal(tree, shape=TreeSpec.parse("chain:2"))
    slots.update([(sequence, drafted)], stream)
    device.wait(stream)
    device.array(slots.at["roots"])[:] = 77
    slots.update([(sequence, drafted)], stream)
    device.wait(stream)
    assert (device.array(slots.at["roots"]) == 77).all()
    slots.update([(sequence, Proposal(tree))], stream)  # it drafts no more
    device.wait(stream)
    assert not device.array(slots.at["growths"]).any()
    assert device.array(slots.at["roots"])[1] == sequence.tokens[-1]
