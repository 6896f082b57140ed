"""The library of operators that graphs for a CPU are made of; see plugins/cpu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specbuild.runtime.backends.kernels.library import OPERATORS, find_library
from specbuild.runtime.errors import ExecutionError, one_line


def operators() -> Path:
    """Return the library's path; raise ExecutionError if specbuild was installed without it."""
    if (path := find_library(OPERATORS)) is None:
        raise ExecutionError(
            "specbuild was installed without its operators for CPUs: install a C++ compiler, and then specbuild again"
        )
    return path


def register(options: Any) -> None:
    """Add the operators to a session's options; raise ExecutionError if there are none, or they do not load."""
    path = operators()
    try:
        options.register_custom_ops_library(str(path))
    except Exception as error:  # ONNX Runtime raises many unrelated types
        raise ExecutionError(f"{path} does not load: {one_line(error)}") from None
