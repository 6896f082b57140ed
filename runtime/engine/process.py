"""Processes: an engine belongs to the one that loaded it, for neither threads nor models live on in a forked child."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress

from specbuild.runtime.decoding.loop import Loop
from specbuild.runtime.errors import EngineClosedError

FORKED = "the engine was loaded before this process was forked: load the bundle in each worker, after the fork"
_LOOPS = weakref.WeakSet[Loop]()


class Home:
    """The process that made this object; takes no lock, so a fork in the middle of anything does no harm."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def left(self) -> bool:
        """Whether this is a forked child of that process."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raises EngineClosedError in a forked child."""
        if self.left:
            raise EngineClosedError(FORKED)


def keep_in_children(loop: Loop) -> None:
    """Have forked children never free this loop: a model's end waits for threads that they do not have."""
    _LOOPS.add(loop)


def _keep() -> None:
    import ctypes

    loops = list(_LOOPS)
    for loop in loops:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(loop))
    if loops:
        # ONNX Runtime's exit handler waits for such threads too: the last one registered runs first, and is `_exit`,
        # once Python has ended as always and C's streams are flushed.
        with suppress(AttributeError):  # a C library without `on_exit`
            libc = ctypes.CDLL(None)
            libc.on_exit(libc._exit, None)
            getattr(libc, "__cxa_atexit")(libc.fflush, None, None)


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_keep)
