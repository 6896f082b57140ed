"""Find the compiled libraries of this installation, if it has them: the kernels and the TensorRT plugin."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

LIBRARY, PLUGIN = "libspecbuild_kernels.so", "libspecbuild_plugin.so"


def find_library(name: str = LIBRARY) -> Path | None:
    """Return the path of a library that `SPECBUILD_CUDA=1 pip install .` compiled, editable or not; None without it."""
    try:
        path = Path(str(distribution("specbuild-trt").locate_file(f"specbuild/runtime/lib/{name}")))
    except PackageNotFoundError:
        return None
    return path if path.is_file() else None
