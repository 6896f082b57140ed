"""The stand-in's driver as the libraries that execute models use it: Python functions as kernels, on its streams."""

from __future__ import annotations

import ctypes
import functools
import itertools

_RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_MEMORY_TYPE, _DEVICE = 2, 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_MEMORYTYPE_DEVICE
_work = {}  # what is enqueued, by the number that is its argument, and whether only once
_numbers = itertools.count(1)
failures = []  # what went wrong in work, in order


@functools.cache
def library():
    """The driver, whose primary context is retained for as long as the process lives, as CUDA's runtime does."""
    found = ctypes.CDLL("libcuda.so.1")
    found.card_enqueue.argtypes = ctypes.c_void_p, _RUN, ctypes.c_void_p
    found.card_fail.argtypes = (ctypes.c_char_p,)
    found.card_count.restype = ctypes.c_size_t
    if status := found.cuInit(0):
        raise RuntimeError(f"CUDA error {status}")
    return found


def counts():
    """What is there on the device."""
    kinds = ("memory", "pinned", "streams", "events", "graphs", "execs")
    return {kind: library().card_count(kind.encode()) for kind in kinds}


@functools.cache
def _primary():
    context = ctypes.c_void_p()
    _check("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    return context


def _check(name, *arguments):
    if status := getattr(library(), name)(*arguments):
        raise RuntimeError(f"CUDA error {status} in {name}")


def enter():
    """A thread without a context takes the device's, as CUDA's runtime lets it."""
    current = ctypes.c_void_p()
    _check("cuCtxGetCurrent", ctypes.byref(current))
    if not current.value:
        _check("cuCtxSetCurrent", _primary())


@_RUN
def _run(number: int) -> None:
    work, once = _work[number]
    if once:
        del _work[number]
    try:
        work()
    except BaseException as error:
        failures.append(" ".join(str(error).split()))
        library().card_fail(failures[-1].encode())


def enqueue(stream, work):
    """Work that runs in a stream's order, or as often as the graph that is captured there runs."""
    number = next(_numbers)
    _work[number] = work, not capturing(stream)  # of graphs for good: nobody says when they go
    _check("card_enqueue", ctypes.c_void_p(stream), _run, ctypes.c_void_p(number))


def capturing(stream):
    """Whether a stream records."""
    enter()
    status = ctypes.c_int()
    _check("cuStreamIsCapturing", ctypes.c_void_p(stream), ctypes.byref(status))
    return status.value != 0


def wait(stream):
    """Wait for a stream; one that captures is broken by it. Raises RuntimeError."""
    enter()
    _check("cuStreamSynchronize", ctypes.c_void_p(stream))


def check_stream(stream):
    """Raises RuntimeError where there is no such stream."""
    enter()
    _check("cuStreamGetId", ctypes.c_void_p(stream), ctypes.byref(ctypes.c_ulonglong()))


def check_memory(name, address, size):
    """Raises RuntimeError where a tensor is not the device's memory, from its first byte to its last."""
    enter()
    for at in (address, address + max(size, 1) - 1):
        kind = ctypes.c_uint(0)
        status = library().cuPointerGetAttribute(ctypes.byref(kind), _MEMORY_TYPE, ctypes.c_uint64(at))
        if status or kind.value != _DEVICE:
            raise RuntimeError(f"{name} at {address:#x} is not {size} bytes of the device's memory")
