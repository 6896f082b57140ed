"""Fork safety: an engine belongs to the process that loaded it; its threads and models do not survive a fork."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress

from specbuild.runtime.decoding.loop import Loop
from specbuild.runtime.errors import EngineClosedError

FORKED = "the engine was loaded before this process was forked: load the bundle in each worker, after the fork"
_LOOPS = weakref.WeakSet[Loop]()


class Home:
    """The process that made this object; it takes no lock, so that a fork at any moment does no harm."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def left(self) -> bool:
        """Return whether the caller is in a forked child of that process."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raise EngineClosedError in a forked child."""
        if self.left:
            raise EngineClosedError(FORKED)


def keep_in_children(loop: Loop) -> None:
    """Keep forked children from freeing this loop: freeing a model waits for threads that they do not have."""
    _LOOPS.add(loop)


def _keep() -> None:
    import ctypes

    loops = list(_LOOPS)
    for loop in loops:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(loop))
    if loops:
        # ONNX Runtime's exit handler waits for such threads too. Exit handlers run in reverse order of registration:
        # after Python has ended as usual, C's streams are flushed, then `_exit` keeps earlier handlers from running.
        with suppress(AttributeError):  # a C library without `on_exit`
            libc = ctypes.CDLL(None)
            libc.on_exit(libc._exit, None)
            getattr(libc, "__cxa_atexit")(libc.fflush, None, None)


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_keep)
