"""Where the compiled kernels' library is, if this installation has one."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

LIBRARY = "libspecbuild_kernels.so"


def find_library() -> Path | None:
    """What `SPECBUILD_CUDA=1 pip install .` compiled, editable or not; None without it."""
    try:
        path = Path(str(distribution("specbuild-trt").locate_file(f"specbuild/runtime/lib/{LIBRARY}")))
    except PackageNotFoundError:
        return None
    return path if path.is_file() else None
