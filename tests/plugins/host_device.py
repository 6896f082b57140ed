"""A device that is this process's memory, as lazy as a GPU may be: nothing runs before a wait, the other streams first.

What is read before it has run, an upload's source that is overwritten too early, two streams without `after`, a graph
that depends on when it was captured: each gives other tokens here. The kernels are those compiled for the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from specbuild.runtime.backends.device import Model, Step, Tensor
from specbuild.runtime.kernels import KernelLibrary

Array = NDArray[Any]


class HostDevice:
    """See `Device`; addresses are NumPy's."""

    def __init__(self) -> None:
        self.uncaptured: list[str] = []
        self.captured = 0
        self._kept: list[Array] = []
        self._streams: dict[int, list[Step]] = {}
        self._capturing: dict[int, list[Step]] = {}

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Tensor:
        assert not self._capturing, "memory is made before a graph"
        array = self.pinned(shape, dtype)
        return Tensor(array.ctypes.data, tuple(shape), array.dtype)

    def pinned(self, shape: Sequence[int], dtype: DTypeLike) -> Array:
        self._kept.append(np.zeros(shape, dtype))
        return self._kept[-1]

    def stream(self) -> int:
        self._streams[len(self._streams) + 1] = []
        return len(self._streams)

    def run(self, stream: int, step: Step) -> None:
        """Enqueue anything."""
        self._capturing.get(stream, self._streams[stream]).append(step)

    def upload(self, to: Tensor, source: Array, stream: int) -> None:
        assert source.flags.c_contiguous
        self._move(to.address, source.ctypes.data, source.nbytes, stream)

    def download(self, to: Array, source: Tensor, stream: int) -> None:
        assert to.flags.c_contiguous
        self._move(to.ctypes.data, source.address, to.nbytes, stream)

    def copy(self, to: Tensor, source: Tensor, stream: int) -> None:
        self._move(to.address, source.address, source.nbytes, stream)

    def _move(self, to: int, source: int, size: int, stream: int) -> None:
        for address in (to, source):  # both are pinned or the device's, all of them
            begins = [(address - kept.ctypes.data, kept.nbytes) for kept in self._kept]
            assert any(begin >= 0 and begin + size <= most for begin, most in begins)
        self.run(stream, lambda: ctypes.memmove(to, source, size) and None)

    def move_rows(self, cache: Tensor, slot: int, rows: Sequence[int], start: int, stream: int) -> None:
        whole, rows = self.array(cache), list(rows)

        def step() -> None:
            moved = whole[:, slot, :, rows].copy()
            whole[:, slot, :, start : start + len(rows)] = moved.transpose(1, 2, 0, 3)

        self.run(stream, step)

    def array(self, tensor: Tensor) -> Array:
        """The memory of a tensor."""
        memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.address)
        return np.frombuffer(memory, dtype=tensor.dtype).reshape(tensor.shape)

    def after(self, stream: int, other: int) -> None:
        assert not self._capturing
        behind = self._streams[other]
        marker: Step = lambda: None  # noqa: E731
        behind.append(marker)

        def wait() -> None:
            while any(step is marker for step in behind):
                behind.pop(0)()

        self.run(stream, wait)

    def wait(self, stream: int) -> None:
        assert not self._capturing, "a graph never waits"
        for steps in [*(s for number, s in self._streams.items() if number != stream), self._streams[stream]]:
            while steps:
                steps.pop(0)()

    def graph(self, enqueue: Step, stream: int) -> Step:
        self._capturing[stream] = steps = []
        enqueue()
        del self._capturing[stream]
        self.captured += 1
        return lambda: self._streams[stream].extend(steps)

    def close(self) -> None:
        for stream in self._streams:
            self.wait(stream)
        self._kept.clear()


class HostQueue:
    """The kernels' library behind a device's streams; a struct is copied when it is launched."""

    def __init__(self, library: KernelLibrary, device: HostDevice) -> None:
        self._library, self._device = library, device

    def launch(self, name: str, params: ctypes.Structure, stream: int = 0) -> None:
        kept = type(params).from_buffer_copy(params)
        self._device.run(stream, lambda: self._library.launch(name, kept))

    def workspace(self, params: Any) -> int:
        return self._library.workspace(params)


class QueuedModel:
    """A model that computes at once, behind a device's streams."""

    def __init__(self, model: Model, device: HostDevice) -> None:
        self._model, self._device = model, device
        self.steps: list[int] = []  # of how many nodes
        self.spoil: Callable[[int], None] | None = None  # called after a step of so many nodes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def enqueue(self, nodes: int, stream: int) -> None:
        assert nodes in self._model.buckets
        self._run(stream, nodes, lambda: self._model.enqueue(nodes, stream))

    def prefill(self, slot: int, nodes: int, stream: int) -> None:
        assert nodes <= self._model.chunk
        self._run(stream, nodes, lambda: self._model.prefill(slot, nodes, stream))

    def _run(self, stream: int, nodes: int, step: Step) -> None:
        def run() -> None:
            step()
            self.steps.append(nodes)
            if self.spoil:
                self.spoil(nodes)

        self._device.run(stream, run)
