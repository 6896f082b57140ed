"""Where a test's arrays lie for a kernel: in this process, or copied to a GPU and back."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specbuild.runtime.backends.kernels.abi import KernelLibrary

Array = NDArray[Any]


class HostKernels:
    """The kernels over NumPy's own memory."""

    def __init__(self, library: KernelLibrary) -> None:
        self.library = library

    def at(self, array: Array | None) -> int | None:
        """The address of an array's first number, for a struct."""
        return None if array is None else array.ctypes.data

    def launch(self, name: str, params: ctypes.Structure) -> None:
        """Run a kernel to its end: what it wrote is in the arrays then."""
        self.library.launch(name, params)


class CudaKernels(HostKernels):
    """The kernels on a GPU: an array goes there when its address is asked for, and comes back after the launch."""

    def __init__(self, library: KernelLibrary) -> None:
        super().__init__(library)
        from cuda.bindings import runtime

        self._cuda = runtime
        self._copies: dict[int, tuple[Array, int]] = {}

    def at(self, array: Array | None) -> int | None:
        """The address on the device; a view's lies inside that of the array it is a view of."""
        if array is None:
            return None
        whole = array
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        if id(whole) not in self._copies:
            pointer = int(self._call("cudaMalloc", max(whole.nbytes, 1)))
            self._call("cudaMemcpy", pointer, whole.ctypes.data, whole.nbytes, self._kind("HostToDevice"))
            self._copies[id(whole)] = whole, pointer
        return self._copies[id(whole)][1] + array.ctypes.data - whole.ctypes.data

    def launch(self, name: str, params: ctypes.Structure) -> None:
        """Run a kernel and bring all arrays back; their addresses are not valid after that."""
        copies, self._copies = self._copies, {}
        try:
            self.library.launch(name, params)
            self._call("cudaDeviceSynchronize")
            for whole, pointer in copies.values():
                self._call("cudaMemcpy", whole.ctypes.data, pointer, whole.nbytes, self._kind("DeviceToHost"))
        finally:
            for _, pointer in copies.values():
                self._cuda.cudaFree(pointer)

    def _kind(self, name: str) -> Any:
        return getattr(self._cuda.cudaMemcpyKind, f"cudaMemcpy{name}")

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *results = getattr(self._cuda, name)(*arguments)
        assert error == self._cuda.cudaError_t.cudaSuccess, f"{name}: {error}"
        return results[0] if results else None


def gpus() -> int:
    """How many NVIDIA GPUs the driver shows; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


GPU = [pytest.param("cuda", marks=pytest.mark.gpu)] if gpus() else []  # a fixture's further parameter
