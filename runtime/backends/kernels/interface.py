"""The interface of what launches the kernels."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol


class Kernels(Protocol):
    """The kernels of plugins/kernels.h: `KernelLibrary`, or `CubinKernels` from a bundle."""

    def launch(self, name: str, params: ctypes.Structure, stream: int = 0) -> None:
        """Enqueue a kernel.

        Args:
            name: The launcher's name, a key of `LAUNCHERS` in abi.py.
            params: The launcher's struct.
            stream: The stream to enqueue it on.

        Raises:
            OptionError: If the parameters are refused.
        """
        ...

    def workspace(self, params: Any) -> int:
        """Return the bytes of workspace that TreeAttention or a token choice needs."""
        ...

    def splits(self, params: Any, processors: int) -> int:
        """Return into how many parts TreeAttention splits the context to keep so many multiprocessors busy."""
        ...
