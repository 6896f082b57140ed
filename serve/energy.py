"""Energy meters: joules of the processors by RAPL and of the GPUs by NVML, where they are readable."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")
_NVML = "libnvidia-ml.so.1"


class Energy:
    """Measures the joules of processor packages and GPUs between calls; a meter that cannot be read is left out."""

    def __init__(self, powercap: Path = POWERCAP, library: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._zones = [zone for zone in sorted(powercap.glob("intel-rapl:*")) if zone.name.count(":") == 1]
        self._gpus = _gpus(library)
        self._last = self._read()

    def joules(self) -> float | None:
        """Return the joules since the last call, or since construction; None if no meter can be read."""
        before, self._last = self._last, self._read()
        both = before.keys() & self._last.keys()
        return sum(self._since(name, before[name]) for name in both) if both else None

    def _since(self, name: str, before: tuple[float, float]) -> float:
        """Return the increase of a meter, which begins at 0 again after its maximum."""
        (then, _), (now, wrap) = before, self._last[name]
        return now - then if now >= then else now - then + wrap

    def _read(self) -> dict[str, tuple[float, float]]:
        """Return for each meter the joules so far and its maximum."""
        found = {}
        for zone in self._zones:
            try:
                now, wrap = (float((zone / name).read_text()) / 1e6 for name in ("energy_uj", "max_energy_range_uj"))
            except (OSError, ValueError):  # on most systems only root may read it
                continue
            found[zone.name] = now, wrap
        for number, (library, device) in enumerate(self._gpus):
            millijoules = ctypes.c_ulonglong()
            if library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules)) == 0:
                found[f"gpu{number}"] = millijoules.value / 1e3, float(1 << 63)
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
