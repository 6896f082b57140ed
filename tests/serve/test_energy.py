"""Meters: what they say is added up, what cannot be read is left out."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from specbuild.serve.energy import Energy


def nothing(_: str) -> Any:
    raise OSError("no such library")


def meter(folder: Path, name: str, joules: float, most: float = 1000.0) -> None:
    zone = folder / name
    zone.mkdir(exist_ok=True)
    for file, value in (("energy_uj", joules), ("max_energy_range_uj", most)):
        (zone / file).write_text(f"{round(value * 1e6)}\n")


def test_packages_are_added_up_and_their_parts_are_not(tmp_path: Path) -> None:
    for name in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0"):
        meter(tmp_path, name, 100.0)
    energy = Energy(tmp_path, nothing)
    for name, now in (("intel-rapl:0", 150.0), ("intel-rapl:1", 20.0), ("intel-rapl:0:0", 900.0)):
        meter(tmp_path, name, now)
    assert energy.joules() == pytest.approx(50 + 920), "the second came to its end and began again"
    assert energy.joules() == 0.0


def test_what_cannot_be_read_is_absent(tmp_path: Path) -> None:
    assert Energy(tmp_path / "none", nothing).joules() is None
    (tmp_path / "intel-rapl:0").mkdir()
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("broken")
    assert Energy(tmp_path, nothing).joules() is None


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


def test_cards_say_what_they_took(tmp_path: Path) -> None:
    nvml = Nvml()
    energy = Energy(tmp_path, lambda name: nvml)
    nvml.millijoules += 2500
    assert energy.joules() == 2.5
    assert Energy(tmp_path, lambda name: Nvml(status=9)).joules() is None
    assert Energy(tmp_path, lambda name: object()).joules() is None
