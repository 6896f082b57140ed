"""The meter: what cards say is added up, what cannot be read is left out."""

from __future__ import annotations

import ctypes
from typing import Any

from specbuild.serve.cost.energy import Energy


class Nvml:
    """A library of two cards, of which one has no meter."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.millijoules = status, 5000

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return self.status

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:  # noqa: N802
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, device: ctypes.c_void_p, found: Any) -> int:  # noqa: N802
        found._obj.value = self.millijoules
        return 0 if device.value == 1 else 3


def test_cards_say_what_they_took() -> None:
    nvml = Nvml()
    energy = Energy(lambda name: nvml)
    nvml.millijoules += 2500
    assert energy.joules() == 2.5
    assert Energy(lambda name: Nvml(status=9)).joules() is None
    assert Energy(lambda name: object()).joules() is None


def test_without_the_library_there_is_no_meter() -> None:
    def absent(_: str) -> Any:
        raise OSError("no such library")

    assert Energy(absent).joules() is None
