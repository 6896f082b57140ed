"""An NVIDIA GPU as a `Device`: cuda.core for context and streams, driver calls for memory, copies and graphs.

Neither is imported before a `Cuda` is made, and `check_driver` needs neither.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from specbuild.runtime.errors import ExecutionError, SpecbuildError, one_line

from .capture import Capture
from .copies import row_copy, strided_copy
from .device import Place, Step, Tensor

CUDA = (13, 0)  # version of bindings and TensorRT; a driver serves newer minor versions of its major version
_DRIVER = "libcuda.so.1"
_NO_DEVICE, _BUSY = 100, 600  # CUDA_ERROR_NO_DEVICE, CUDA_ERROR_NOT_READY


def check_driver(needs: tuple[int, int] = CUDA) -> None:
    """Raise ExecutionError without a driver, a GPU, or support of CUDA version `needs`; this needs no package."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        raise ExecutionError(
            f"there is no NVIDIA driver ({_DRIVER}): install one for CUDA {_dotted(needs)} or newer"
        ) from None
    version, devices = ctypes.c_int(0), ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(devices))
    if fault := driver_fault(needs, version.value, status, devices.value):
        raise ExecutionError(fault)


def driver_fault(needs: tuple[int, int], version: int, status: int, devices: int) -> str | None:
    """Return what is wrong with a driver, or None.

    Args:
        needs: The CUDA version that it must support.
        version: The CUDA version that it supports, as 1000 · major + 10 · minor.
        status: The CUDA error of starting it; 0: none.
        devices: How many GPUs it shows.
    """
    if status not in (0, _NO_DEVICE):
        return f"the NVIDIA driver does not start (CUDA error {status}): look at nvidia-smi"
    if not devices:
        return "the NVIDIA driver shows no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES"
    if (supported := _version(version)) < needs:
        return f"the NVIDIA driver is for CUDA {_dotted(supported)}, and {_dotted(needs)} is needed: update the driver"
    return None


def _version(number: int) -> tuple[int, int]:
    return number // 1000, number % 1000 // 10


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _mebibytes(size: int) -> int:
    return -(-size >> 20)


class _Current:
    """A context manager that makes the GPU the calling thread's, and CUDA's errors ExecutionErrors."""

    def __init__(self, core: Any, index: int) -> None:
        self._core, self._index, self._thread = core, index, threading.local()

    def __enter__(self) -> None:
        if not hasattr(self._thread, "device"):
            try:
                device = self._core.Device(self._index)
                device.set_current()
            except Exception as error:  # cuda.core raises many types
                raise ExecutionError(f"GPU {self._index} cannot be used: {one_line(error)}") from error
            self._thread.device = device

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, SpecbuildError):
            raise ExecutionError(f"CUDA failed: {one_line(error)}") from error


class Cuda:
    """See `Device`; any thread may use it, one at a time. Other code's calls on this GPU need the context `current`."""

    def __init__(self, index: int = 0) -> None:
        """Open a GPU; raise ExecutionError if the driver, the GPU or a package is missing."""
        check_driver()
        try:
            from cuda import core
            from cuda.bindings import driver
        except ImportError as error:
            raise ExecutionError(f"CUDA's packages are missing ({error}): pip install 'specbuild-trt[cuda]'") from None
        self._core, self._driver = core, driver
        self.current = _Current(core, index)
        self._capture = Capture(driver, self._do, self.current)
        with self.current:
            device = core.Device(index)
            self.name = str(device.name)
            self.capability = str(device.arch)  # "90"
            self.multiprocessors = int(device.properties.multiprocessor_count)
            self.driver_version = _version(self._do(driver.cuDriverGetVersion()))
        self.uncaptured: list[str] = []
        self.identity: dict[str, Any] = {"processor": self.name, "driver": _dotted(self.driver_version)}
        self._device = device
        self._streams: dict[int, Any] = {}
        self._frees: list[Step] = []
        self._own = self.stream()

    @property
    def memory(self) -> tuple[int, int]:
        """Free and total memory in bytes."""
        with self.current:
            free, total = self._do(self._driver.cuMemGetInfo())
        return int(free), int(total)

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Tensor:
        """Zero memory of the GPU; see `Device.empty`."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        address = self._allocate(size)
        self._frees.append(functools.partial(self._free, address))
        tensor = Tensor(address, tuple(shape), np.dtype(dtype))
        self.fill(tensor, 0, self._own)
        self.wait(self._own)
        return tensor

    def _allocate(self, size: int) -> int:
        """Return the address of at least one byte; not from a pool, so that freed memory is free for every process."""
        with self.current:
            try:
                return int(self._do(self._driver.cuMemAlloc(max(size, 1))))
            except ExecutionError as error:
                free, total = (_mebibytes(part) for part in self.memory)
                raise ExecutionError(
                    f"{_mebibytes(size)} MiB do not fit the GPU, {free} of {total} MiB are free: free some, or use a "
                    f"smaller batch ({one_line(error)})"
                ) from None

    def _free(self, address: int) -> None:
        self._do(self._driver.cuMemFree(address))

    def pinned(self, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """Page-locked memory; see `Device.pinned`. Its arrays must not be touched after `close`."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        with self.current:
            buffer = self._core.LegacyPinnedMemoryResource().allocate(max(size, 1))
        self._frees.append(buffer.close)
        array = np.ctypeslib.as_array((ctypes.c_uint8 * max(size, 1)).from_address(int(buffer.handle)))
        array[:] = 0
        typed: NDArray[Any] = array[:size].view(dtype)
        return typed.reshape(shape)

    def stream(self) -> int:
        """Create a stream that waits for no other."""
        with self.current:
            stream = self._device.create_stream()
        handle = int(stream.handle)
        self._streams[handle] = stream
        return handle

    def upload(self, to: Tensor, source: NDArray[Any], stream: int) -> None:
        """Host to GPU; see `Device.upload`."""
        self._copy(to.address, source.ctypes.data, source.nbytes, stream)

    def download(self, to: NDArray[Any], source: Tensor, stream: int) -> None:
        """GPU to host; see `Device.download`."""
        self._copy(to.ctypes.data, source.address, to.nbytes, stream)

    def copy(self, to: Tensor, source: Tensor, stream: int) -> None:
        """GPU to GPU; see `Device.copy`."""
        self._copy(to.address, source.address, source.nbytes, stream)

    def _copy(self, to: int, source: int, size: int, stream: int) -> None:
        with self.current:
            self._do(self._driver.cuMemcpyAsync(to, source, size, stream))

    def fill(self, to: Tensor, byte: int, stream: int) -> None:
        """Enqueue setting every byte of a tensor to `byte`."""
        with self.current:
            self._do(self._driver.cuMemsetD8Async(to.address, byte, to.nbytes, stream))

    def copy_rows(self, to: Tensor, source: Tensor, stream: int) -> None:
        """One copy; see `Device.copy_rows`."""
        with self.current:
            self._do(self._driver.cuMemcpy2DAsync(strided_copy(self._driver, to, source), stream))

    def move_rows(self, cache: Tensor, source: Place, to: Place, count: int, stream: int) -> None:
        """One copy; see `Device.move_rows`."""
        with self.current:
            self._do(self._driver.cuMemcpy3DAsync(row_copy(self._driver, cache, source, to, count), stream))

    def after(self, stream: int, other: int) -> None:
        """Order two streams; see `Device.after`."""
        with self.current:
            self._streams[stream].wait(self._streams[other])

    def wait(self, stream: int) -> None:
        """Block; see `Device.wait`."""
        with self.current:
            self._streams[stream].sync()

    def reached(self, counter: NDArray[np.uint64], value: int, stream: int) -> bool:
        """Poll; see `Device.reached`."""
        with self.current:
            while counter[0] < value and (status := self._driver.cuStreamQuery(stream))[0] == _BUSY:
                time.sleep(0)  # let other threads run
            if counter[0] < value:
                self._do(status)
        return bool(counter[0] >= value)

    def mark(self, stream: int, mark: Any = None) -> Any:
        """Record an event; see `Device.mark`."""
        with self.current:
            timing = None if mark else self._core.EventOptions(timing_enabled=True)
            return self._streams[stream].record(mark, timing)

    @property
    def capturing(self) -> bool:
        """Return whether a graph is being captured."""
        return self._capture.active

    def graph(self, enqueue: Step, stream: int) -> Step:
        """Capture; see `Device.graph`. What `enqueue` calls must have run once, so that a capture allocates nothing."""
        return self._try(lambda: self._capture.once(stream, enqueue)) or enqueue

    def loop(self, body: Callable[[int], None], stream: int) -> Step | None:
        """Capture; see `Device.loop`, and `graph`."""
        return self._try(lambda: self._capture.repeated(stream, body))

    def _try(self, capture: Callable[[], Step]) -> Step | None:
        try:
            return capture()
        except SpecbuildError as error:
            self.uncaptured.append(one_line(error))
        return None

    def measure_bandwidth(self, size: int = 1 << 28, times: int = 10) -> float:
        """Return bytes per second, read plus written, of copies of `size` bytes within the GPU's memory."""
        both = self._allocate(2 * size)
        to, source = (Tensor(both + start, (size,), np.dtype(np.uint8)) for start in (0, size))
        try:
            self.copy(to, source, self._own)
            begin = self.mark(self._own)
            for _ in range(times):
                self.copy(to, source, self._own)
            end = self.mark(self._own)
            self.wait(self._own)
            return float(2 * size * times / ((end - begin) / 1000))
        finally:
            with self.current:
                self._free(both)

    def close(self) -> None:
        """Free everything once all work has run or failed; see `Device.close`."""
        steps = self._finish, *self._frees, *(stream.close for stream in self._streams.values())
        errors = list[ExecutionError]()
        for step in steps:
            try:
                with self.current:
                    step()
            except ExecutionError as error:  # a GPU that failed refuses all later calls
                errors.append(error)
        self._frees, self._streams = [], {}
        if errors:
            raise errors[0]

    def _finish(self) -> None:
        self._do(self._driver.cuCtxSynchronize())

    def _do(self, answer: tuple[Any, ...]) -> Any:
        """Return the results of a driver's call, one or several; raise ExecutionError if it failed."""
        status, *results = answer
        if status:
            raise ExecutionError(f"CUDA failed: {status.name}")
        return results[0] if len(results) == 1 else results
