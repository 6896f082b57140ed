"""Named ranges on a profiler's timeline (Nsight Systems) through the `nvtx` package; off until `enable` is called."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from specbuild.runtime.errors import OptionError

Name = Literal["round", "draft level", "verify", "accept", "commit"]
enabled = False
_OFF: AbstractContextManager[None] = nullcontext()
_package: Any = None


def enable() -> None:
    """Turn ranges on for this process; raise OptionError if the nvtx package is missing."""
    global enabled, _package
    try:
        _package = importlib.import_module("nvtx")
    except ImportError:
        raise OptionError("ranges for a profiler need the nvtx package: pip install nvtx") from None
    enabled = True


def range(name: Name) -> AbstractContextManager[Any]:
    """Return a context manager that marks a range on this thread; a shared no-op while ranges are off."""
    if not enabled:
        return _OFF
    made: AbstractContextManager[Any] = _package.annotate(message=name, domain="specbuild")
    return made
