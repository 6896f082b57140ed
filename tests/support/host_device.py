"""A device that is this process's memory, as lazy as a GPU may be: nothing runs before a wait, the other streams first.

What is read before it has run, an upload's source that is overwritten too early, two streams without `after`, a graph
that depends on when it was captured: each gives other tokens here. The kernels are those compiled for the host.

A loop takes a turn whenever it is asked whether it has got far enough, and `ahead` turns more: it is as lazy, or as far
ahead, as a GPU may be.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends.gpu.device import Step, Tensor

Array = NDArray[Any]


class HostDevice:
    """See `Device`; addresses are NumPy's."""

    def __init__(self):
        self.uncaptured: list[str] = []
        self.identity: dict[str, Any] = {"processor": "a host in a device's place"}
        self.captured = self.turns = self.ahead = 0
        self.clock: Callable[[], float] = time.perf_counter
        self._kept: list[Array] = []
        self._streams: dict[int, list[Step]] = {}
        self._capturing: dict[int, list[Step]] = {}

    @property
    def capturing(self):
        return bool(self._capturing)

    def empty(self, shape, dtype):
        assert not self._capturing, "memory is made before a graph"
        array = self.pinned(shape, dtype)
        return Tensor(array.ctypes.data, tuple(shape), array.dtype)

    def pinned(self, shape, dtype):
        self._kept.append(np.zeros(shape, dtype))
        return self._kept[-1]

    def stream(self):
        self._streams[len(self._streams) + 1] = []
        return len(self._streams)

    def run(self, stream, step):
        """Enqueue anything; while a graph is captured, on a stream that is ordered with the graph's."""
        (self._capturing or self._streams)[stream].append(step)

    def upload(self, to, source, stream):
        assert source.flags.c_contiguous
        self._move(to.address, source.ctypes.data, source.nbytes, stream)

    def download(self, to, source, stream):
        assert to.flags.c_contiguous
        self._move(to.ctypes.data, source.address, to.nbytes, stream)

    def fill(self, to, byte, stream):
        whole = self.array(to).reshape(-1).view(np.uint8)
        self.run(stream, lambda: whole.fill(byte))

    def copy(self, to, source, stream):
        self._move(to.address, source.address, source.nbytes, stream)

    def copy_rows(self, to, source, stream):
        length, apart = (tensor.nbytes // tensor.shape[0] for tensor in (source, to))
        assert source.shape[0] <= to.shape[0]
        assert length <= apart
        for row in range(source.shape[0]):
            self._move(to.address + row * apart, source.address + row * length, length, stream)

    def _move(self, to, source, size, stream):
        for address in (to, source):  # both are pinned or the device's, all of them
            begins = [(address - kept.ctypes.data, kept.nbytes) for kept in self._kept]
            assert any(begin >= 0 and begin + size <= most for begin, most in begins)
        self.run(stream, lambda: ctypes.memmove(to, source, size) and None)

    def move_rows(self, cache, source, to, count, stream):
        whole = self.array(cache)
        parts = [whole[:, slot, :, row : row + count] for slot, row in (source, to)]
        assert not np.shares_memory(*parts)
        self.run(stream, lambda: np.copyto(parts[1], parts[0]))

    def array(self, tensor):
        """The memory of a tensor."""
        memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.address)
        return np.frombuffer(memory, dtype=tensor.dtype).reshape(tensor.shape)

    def after(self, stream, other):
        if self._capturing:
            self._capturing.setdefault(stream, [])
        behind = (self._capturing or self._streams)[other]
        behind.append(lambda: None)
        self.run(stream, Wait(behind, behind[-1]))

    def wait(self, stream):
        assert not self._capturing, "a graph never waits"
        for steps in [*(s for number, s in self._streams.items() if number != stream), self._streams[stream]]:
            while steps:
                steps.pop(0)()

    def mark(self, stream, mark=None):
        assert not self._capturing, "a graph notes no time"
        noted = mark or Mark()
        self.run(stream, lambda: setattr(noted, "seconds", self.clock()))
        return noted

    def graph(self, enqueue, stream):
        steps = self._capture(enqueue, stream)
        return lambda: self._streams[stream].extend(steps)

    def _capture(self, enqueue, stream):
        """The steps in an order in which they may run, those of other streams as late as `after` allows."""
        self._capturing = {stream: []}
        try:
            enqueue()
        finally:
            recorded, self._capturing = self._capturing, {}
        self.captured += 1
        mine, ordered = recorded[stream], list[Step]()
        while mine:
            ordered += flat(mine.pop(0))
        assert not any(recorded.values()), "a graph has work that nothing in it waits for"
        return ordered

    def loop(self, body, stream):
        condition = self.pinned((1,), np.uint32)
        steps = self._capture(lambda: body(condition.ctypes.data), stream)

        def begin():
            condition[:] = 1
            turn()

        def turn():
            for step in steps:
                step()
            self.turns += 1
            if condition[0]:
                self._streams[stream].insert(0, turn)

        return lambda: self._streams[stream].append(begin)

    def reached(self, counter, value, stream):
        steps = self._streams[stream]
        while steps and counter[0] < value:
            steps.pop(0)()
        for _ in range(self.ahead):
            if steps:
                steps.pop(0)()
        return bool(counter[0] >= value)

    def close(self):
        for stream in self._streams:
            self.wait(stream)
        self._kept.clear()


class Mark:
    """A time that a device noted."""

    seconds = float("nan")

    def __sub__(self, other):
        return 1000 * (self.seconds - other.seconds)


class Wait:
    """A stream's wait for all that another holds up to a marker."""

    def __init__(self, behind, marker):
        self._behind, self._marker = behind, marker

    def __call__(self):
        for step in self.taken():
            step()

    def taken(self):
        """What the other stream still holds of it, and does not hold any more."""
        count = next((at for at, step in enumerate(self._behind, 1) if step is self._marker), 0)
        taken, self._behind[:count] = self._behind[:count], []
        return taken


def flat(step):
    """A step, or the steps of other streams that it waits for."""
    return [each for inner in step.taken() for each in flat(inner)] if isinstance(step, Wait) else [step]


class HostQueue:
    """The kernels' library behind a device's streams; a struct is copied when it is launched."""

    def __init__(self, library, device):
        self._library, self._device = library, device

    def launch(self, name, params, stream=0):
        kept = type(params).from_buffer_copy(params)
        self._device.run(stream, lambda: self._library.launch(name, kept))

    def workspace(self, params):
        return self._library.workspace(params)


class QueuedModel:
    """A model that computes at once, behind a device's streams, where a graph may hold it."""

    capturable = True

    def __init__(self, model, device):
        self._model, self._device = model, device
        self.steps: list[int] = []  # of how many nodes
        self.spoil: Callable[[int], None] | None = None  # called after a step of so many nodes

    def __getattr__(self, name):
        return getattr(self._model, name)

    def enqueue(self, nodes, stream):
        assert nodes in self._model.buckets
        self._run(stream, nodes, lambda: self._model.enqueue(nodes, stream))

    def prefill(self, slot, nodes, last, stream):
        assert nodes in self._model.lengths
        assert last < nodes
        self._run(stream, nodes, lambda: self._model.prefill(slot, nodes, last, stream))

    def _run(self, stream, nodes, step):
        def run():
            step()
            self.steps.append(nodes)
            if self.spoil:
                self.spoil(nodes)

        self._device.run(stream, run)
