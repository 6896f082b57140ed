"""Timing of kernels on a GPU, or for --smoke on the host; part of kernels.py."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT
from specbuild.runtime.backends.kernels.abi import KernelLibrary
from specbuild.runtime.backends.kernels.library import find_library

LAUNCHES, REPLAYS = 20, 15  # minimum launches per graph (at least one per set of inputs); replays that are timed
WARM_SECONDS = 0.1


class Device:
    """The device that runs the kernels: a GPU, or the host for --smoke."""

    def __init__(self, smoke: bool) -> None:
        self.name = "cpu" if smoke else "cuda"
        self.processors = 4 if smoke else torch.cuda.get_device_properties(0).multi_processor_count

    def random(self, *shape: int, dtype: str = "bfloat16") -> torch.Tensor:
        """Return standard normal numbers of this shape."""
        return torch.randn(*shape, device=self.name).to(getattr(torch, dtype))

    def ints(self, values: Any) -> torch.Tensor:
        """Return an int32 tensor."""
        return torch.tensor(values, dtype=torch.int32, device=self.name)

    def stream(self) -> int:
        """Return the handle of the current stream; 0 on the host."""
        return 0 if self.name == "cpu" else torch.cuda.current_stream().cuda_stream

    def microseconds(self, launches: list[Callable[[], Any]]) -> float:
        """Return the median microseconds of a launch; the launches take turns."""
        if self.name == "cpu":
            started = time.perf_counter()
            for launch in launches:
                launch()
            return (time.perf_counter() - started) / len(launches) * 1e6
        count = max(LAUNCHES, len(launches))
        turns = [launches[i % len(launches)] for i in range(count)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for launch in turns:
                launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for launch in turns:
                launch()
        until = time.perf_counter() + WARM_SECONDS  # the GPU was idle during capture
        while time.perf_counter() < until:
            graph.replay()
            torch.cuda.synchronize()
        times = []
        for _ in range(REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(1_000_000)  # so that the host has launched everything before the device begins
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / count)
        return statistics.median(times)


def copy_bandwidth(device: Device) -> float:
    """Return the GB/s of a copy of a GiB (a MiB on the host), bytes read plus bytes written."""
    size = 1 << (20 if device.name == "cpu" else 30)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device.name).random_() for _ in range(2))
    return 2 * size / device.microseconds([lambda: target.copy_(source)]) / 1e3


def load(path: Path | None, smoke: bool, out: Path) -> KernelLibrary:
    """Load the given library, the installed one, or one compiled for this machine."""
    if path or (not smoke and (path := find_library())):
        return KernelLibrary(path)
    target, plugins = out / f"libspecbuild_{'host' if smoke else 'kernels'}.so", ROOT / "plugins"
    sources = sorted((plugins / "kernels").glob("*.cu"))
    if smoke:
        flags = ["-O1", "-ffp-contract=off", "-Wno-unknown-pragmas", "-DSPECBUILD_HOST", "-fPIC", "-x", "c++"]
        host = ROOT / "tests" / "support" / "host"
        command = ["g++", *flags, f"-I{host.parent}", *sources, host / "host.cpp"]
    else:
        command = [
            shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc",
            "-O3",
            "-arch=native",
            "-Xcompiler",
            "-fPIC",
            *sources,
        ]
    subprocess.run([*map(str, command), "-std=c++17", f"-I{plugins}", "-shared", "-o", str(target)], check=True)
    return KernelLibrary(target)
