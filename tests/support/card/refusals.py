"""Captures that the driver refuses somewhere: the device goes on and nothing stays; run by tests/test_card.py."""

import ctypes
import gc

import numpy as np
import pytest
from card_driver import counts
from device import take_gpu

from specbuild.runtime.backends.gpu.cuda import Cuda
from specbuild.runtime.errors import ExecutionError

CARD = ctypes.CDLL("libcuda.so.1")

NOT_SUPPORTED = 801
END = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda at: setattr(ctypes.c_uint.from_address(at), "value", 0))


@pytest.fixture
def cuda():
    """A device, of which nothing is left after its `close`."""
    take_gpu()
    before = counts()
    device = Cuda()
    yield device
    CARD.card_refuse(None, 0, 0)
    device.close()
    gc.collect()
    assert counts() == before


def check(device):
    """One refusal was noted, and a graph and a loop of two kernels each run."""
    assert len(device.uncaptured) == 1
    device.uncaptured.clear()
    stream, to = device.stream(), device.empty((4,), np.uint8)
    step = device.graph(lambda: device.fill(to, 7, stream), stream)
    loop = device.loop(once_round(device, to, stream), stream)
    assert device.uncaptured == []
    assert loop
    array = device.pinned((4,), np.uint8)
    for run, byte in ((step, 7), (loop, 9), (step, 7)):
        run()
        device.download(array, to, stream)
        device.wait(stream)
        assert (array == byte).all()


def once_round(device, to, stream):
    def body(handle):
        device.fill(to, 9, stream)
        assert CARD.card_enqueue(ctypes.c_void_p(stream), END, ctypes.c_void_p(handle)) == 0

    return body


@pytest.mark.parametrize("name", ["cuStreamBeginCapture", "cuGraphInstantiate"])
def test_a_graph_that_is_refused(cuda, name):
    stream, to = cuda.stream(), cuda.empty((4,), np.uint8)

    def enqueue():
        cuda.fill(to, 1, stream)

    CARD.card_refuse(name.encode(), NOT_SUPPORTED, 0)
    assert cuda.graph(enqueue, stream) is enqueue
    check(cuda)


@pytest.mark.parametrize(
    "name",
    [
        *("cuGraphCreate", "cuGraphConditionalHandleCreate", "cuGraphAddNode"),
        *("cuStreamBeginCapture", "cuGraphAddChildGraphNode", "cuGraphInstantiate"),
    ],
)
def test_a_loop_that_is_refused(cuda, name):
    stream, to = cuda.stream(), cuda.empty((4,), np.uint8)
    CARD.card_refuse(name.encode(), NOT_SUPPORTED, 0)
    assert cuda.loop(once_round(cuda, to, stream), stream) is None
    check(cuda)


@pytest.mark.parametrize("kind", ["waits", "leaves a stream out", "raises"])
def test_a_body_that_cannot_be_captured(cuda, kind):
    stream, other, to = cuda.stream(), cuda.stream(), cuda.empty((4,), np.uint8)

    def body(handle):
        once_round(cuda, to, stream)(handle)
        if kind == "waits":
            cuda.wait(stream)
        elif kind == "raises":
            raise ExecutionError("the engine refuses")
        else:
            cuda.after(other, stream)
            cuda.fill(to, 3, other)

    assert cuda.loop(body, stream) is None
    check(cuda)


def test_a_loop_that_may_hold_no_overlapping_kernels_is_captured_again_without(cuda):
    """The edge over which a kernel may start early, which this driver takes in a graph and not in a loop's body."""
    stream, rounds, ran = cuda.stream(), list[int](), list[str]()
    first = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: ran.append("first"))

    def body(handle):
        rounds.append(handle)
        assert CARD.card_enqueue(ctypes.c_void_p(stream), first, None) == 0
        assert CARD.card_programmatic(ctypes.c_void_p(stream)) == 0
        assert CARD.card_enqueue(ctypes.c_void_p(stream), END, ctypes.c_void_p(handle)) == 0

    loop = cuda.loop(body, stream)
    assert (cuda.uncaptured, len(rounds), len(set(rounds))) == ([], 2, 2), "once more, with another condition"
    assert loop
    for times in (1, 2):
        loop()
        cuda.wait(stream)
        assert ran == ["first"] * times
    rounds.clear()
    condition = cuda.pinned((1,), np.uint32)
    condition[:] = 1
    step = cuda.graph(lambda: body(condition.ctypes.data), stream)
    step()
    cuda.wait(stream)
    assert (cuda.uncaptured, len(rounds), condition[0]) == ([], 1, 0)
