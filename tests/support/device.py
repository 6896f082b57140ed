"""Where a test's arrays lie for a kernel: in this process, or copied to a GPU and back."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Array = NDArray[Any]


class HostKernels:
    """The kernels over NumPy's own memory."""

    def __init__(self, library):
        self.library = library

    def at(self, array):
        """The address of an array's first number, for a struct."""
        return None if array is None else array.ctypes.data

    def launch(self, name, params):
        """Run a kernel to its end: what it wrote is in the arrays then."""
        self.library.launch(name, params)


class CudaKernels(HostKernels):
    """The kernels on a GPU: an array goes there when its address is asked for, and comes back after the launch."""

    def __init__(self, library):
        super().__init__(library)
        self._copies: dict[int, tuple[Array, int]] = {}

    def at(self, array):
        """The address on the device; a view's lies inside that of the array it is a view of."""
        if array is None:
            return None
        whole = array
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        if id(whole) not in self._copies:
            take_gpu()
            pointer = int(call("cuMemAlloc", max(whole.nbytes, 1)))
            call("cuMemcpyHtoD", pointer, whole.ctypes.data, whole.nbytes)
            self._copies[id(whole)] = whole, pointer
        return self._copies[id(whole)][1] + array.ctypes.data - whole.ctypes.data

    def launch(self, name, params):
        """Run a kernel and bring all arrays back; their addresses are not valid after that."""
        copies, self._copies = self._copies, {}
        take_gpu()
        try:
            self.library.launch(name, params)
            call("cuCtxSynchronize")
            for whole, pointer in copies.values():
                call("cuMemcpyDtoH", whole.ctypes.data, pointer, whole.nbytes)
        finally:
            for _, pointer in copies.values():
                call("cuMemFree", pointer)


def take_gpu():
    """The first GPU's compute capability ("90"); its context is the calling thread's from now on."""
    from cuda.bindings.driver import CUdevice_attribute as Asked

    call("cuInit", 0)
    device = call("cuDeviceGet", 0)
    if not int(call("cuCtxGetCurrent")):
        call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", device))
    parts = Asked.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, Asked.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    return "".join(str(call("cuDeviceGetAttribute", part, device)) for part in parts)


def call(name, *arguments):
    """What a function of CUDA's driver gives."""
    from cuda.bindings import driver

    status, *results = getattr(driver, name)(*arguments)
    assert status == driver.CUresult.CUDA_SUCCESS, f"{name}: {status}"
    return results[0] if results else None


def gpus():
    """How many NVIDIA GPUs the driver shows; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


GPU = [pytest.param("cuda", marks=pytest.mark.gpu)] if gpus() else []  # a fixture's further parameter
