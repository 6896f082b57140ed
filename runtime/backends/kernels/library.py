"""Find the compiled libraries of this installation, if it has them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

LIBRARY, PLUGIN = "libspecbuild_kernels.so", "libspecbuild_plugin.so"
PLUGIN_VERSION = "1"  # of TreeAttention, as plugins/trt registers it
BLOCK_SIZES = (16, 32, 64, 128, 256)  # rows of a cache page that it takes
OPERATORS = "libspecbuild_cpu.so"  # for ONNX Runtime on a CPU


def find_library(name: str = LIBRARY) -> Path | None:
    """Return the path of a library that was compiled when specbuild was installed, editable or not; None without it."""
    try:
        path = Path(str(distribution("specbuild-trt").locate_file(f"specbuild/runtime/lib/{name}")))
    except PackageNotFoundError:
        return None
    return path if path.is_file() else None
