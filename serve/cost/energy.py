"""The energy meter: joules of the GPUs by NVML, where it is readable."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

_NVML = "libnvidia-ml.so.1"


class Energy:
    """Measures the joules of the GPUs between calls; one that has no meter is left out."""

    def __init__(self, library: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._gpus = _gpus(library)
        self._last = self._read()

    def joules(self) -> float | None:
        """Return the joules since the last call, or since construction; None if no meter can be read."""
        before, self._last = self._last, self._read()
        both = before.keys() & self._last.keys()
        return sum(self._last[number] - before[number] for number in both) if both else None

    def _read(self) -> dict[int, float]:
        """Return the joules so far of each GPU that tells them."""
        found = {}
        for number, (library, device) in enumerate(self._gpus):
            millijoules = ctypes.c_ulonglong()
            if library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules)) == 0:
                found[number] = millijoules.value / 1e3
        return found


def _gpus(library: Callable[[str], Any]) -> list[tuple[Any, ctypes.c_void_p]]:
    """Return NVML and its handle of each GPU; nothing if NVML is not installed or does not start."""
    try:
        nvml = library(_NVML)
        count = ctypes.c_uint()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        handles = [ctypes.c_void_p() for _ in range(count.value)]
        good = [nvml.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(each)) == 0 for i, each in enumerate(handles)]
    except (OSError, AttributeError):
        return []
    return [(nvml, handle) for handle, well in zip(handles, good, strict=True) if well]
