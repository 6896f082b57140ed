"""Named ranges on a profiler's timeline (Nsight Systems): off until `enable`, and then through the `nvtx` package."""

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
    """Switch ranges on for this process; raises OptionError without the package."""
    global enabled, _package
    try:
        _package = importlib.import_module("nvtx")
    except ImportError:
        raise OptionError("ranges for a profiler need the nvtx package: pip install nvtx") from None
    enabled = True


def range(name: Name) -> AbstractContextManager[Any]:
    """A range around what runs in it on this thread; nothing, and always the same nothing, while off."""
    if not enabled:
        return _OFF
    made: AbstractContextManager[Any] = _package.annotate(message=name, domain="specbuild")
    return made
