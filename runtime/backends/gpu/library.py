"""Where the compiled libraries are, if this installation has them: the kernels', and TensorRT's plugin."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

LIBRARY, PLUGIN = "libspecbuild_kernels.so", "libspecbuild_plugin.so"


def find_library(name: str = LIBRARY) -> Path | None:
    """What `SPECBUILD_CUDA=1 pip install .` compiled, editable or not; None without it."""
    try:
        path = Path(str(distribution("specbuild-trt").locate_file(f"specbuild/runtime/lib/{name}")))
    except PackageNotFoundError:
        return None
    return path if path.is_file() else None
