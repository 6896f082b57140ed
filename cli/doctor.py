"""`specbuild doctor`."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
import onnxruntime

from specbuild.builder.codegen.nvrtc import INSTALL, compiler_version
from specbuild.builder.machine import lacks_to_build, lacks_to_run
from specbuild.runtime.backends.kernels.library import find_library
from specbuild.runtime.bundle.backend import BACKENDS, COMPILED, Backend
from specbuild.runtime.errors import OptionError

_FLAVOURS = {name: str(BACKENDS[name].package) for name in COMPILED} | {"tensorrt-lean": "tensorrt_lean"}


@click.command(name="doctor")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(as_json: bool) -> None:
    """Show what this machine has, and what that enables.

    \b
    specbuild doctor --json
    """
    found = examine()
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, value in found.items():
        click.echo(f"{name:26}{value if not isinstance(value, list) else ', '.join(value) or 'none'}")


def examine() -> dict[str, Any]:
    """Return facts about the machine by name."""
    nvrtc, library = _nvrtc(), find_library()
    build = [name for name in ("torch", "transformers", "onnx", "onnxscript", "onnx_ir") if not _importable(name)]
    return {
        "specbuild": version("specbuild-trt"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "GPUs": _gpus(),
        "CUDA driver": _driver(),
        "nvcc": shutil.which("nvcc") or "not found",
        "TensorRT flavours": [f"{name} {_version(name)}" for name, module in _FLAVOURS.items() if _importable(module)],
        "ONNX Runtime": onnxruntime.__version__,
        "ONNX Runtime providers": list(onnxruntime.get_available_providers()),
        "NVRTC": nvrtc or f"not found: {INSTALL}",
        "kernel library": str(library) if library else "not found: SPECBUILD_CUDA=1 pip install . compiles it",
        "CUDA kernels": _kernels(nvrtc, library),
        "build": f"no, missing {', '.join(build)}: pip install 'specbuild-trt[build]'" if build else "yes",
        **{f"{name} bundles": _backend(each, build) for name, each in BACKENDS.items()},
    }


def _backend(backend: Backend, lacking: list[str]) -> str:
    """Describe a backend: its precisions, and whether it builds and runs here, or why not."""
    lacks = {"builds": lacking or lacks_to_build(backend), "runs": lacks_to_run(backend)}
    told = [f"{what} no ({', '.join(why)})" if why else f"{what} yes" for what, why in lacks.items()]
    return f"{', '.join(backend.precisions)}; {'; '.join(told)}"


def _nvrtc() -> str | None:
    """Return NVRTC's version; None if it is not installed."""
    try:
        return compiler_version()
    except OptionError:
        return None


def _kernels(nvrtc: str | None, library: Path | None) -> str:
    """Describe what NVRTC and the kernel library enable."""
    first = f"build --cuda-arch: {'yes, by NVRTC' if nvrtc else 'no'}"
    return f"{first}; launches from C and TensorRT: {'yes, by the library' if library else 'no'}"


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _version(distribution: str) -> str:
    for name in (distribution, f"{distribution}-cu13", f"{distribution}-cu12"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of unknown version"


def _gpus() -> list[str]:
    """Return the GPUs as nvidia-smi describes them: name, compute capability, memory."""
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _driver() -> str:
    """Describe the CUDA version that the driver supports."""
    number = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "not found"
    if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return "found, but does not answer"
    return f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"
