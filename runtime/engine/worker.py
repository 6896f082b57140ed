"""`Worker`: the thread that drives a scheduler's loop, and a watchdog thread that checks on it.

While there is nothing to do, neither thread keeps a reference to the scheduler, so that an unused one is freed.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from queue import Empty, SimpleQueue
from typing import Protocol

_FRAMES = 3  # innermost stack frames reported when the worker is stuck


class Driven(Protocol):
    """The protocol of what a worker drives. When its last owner drops it, a finalizer passes it to `Worker.wake`."""

    def work(self) -> float | None:
        """Do all work there is; return the seconds after which to call again unasked, None: never. Never raises."""
        ...

    def finish(self) -> bool:
        """Return whether the worker should end; if so, free everything first. Never raises."""
        ...

    def watch(self) -> float:
        """Check whether the worker makes progress; return the seconds until the next check."""
        ...


class Worker:
    """The worker thread and its watchdog, both daemon threads."""

    def __init__(self, driven: Driven, interval: float | None) -> None:
        """Start the threads.

        Args:
            driven: What to drive; only a weak reference is kept.
            interval: Seconds until the watchdog's first check; None: no watchdog.

        Raises:
            RuntimeError: The system cannot start another thread.
        """
        self._calls, self._ended = SimpleQueue[Driven | None](), threading.Event()
        ref = weakref.ref(driven)
        self._thread = threading.Thread(
            target=_drive, args=(ref, self._calls, self._ended), name="specbuild", daemon=True
        )
        self._watchdog: threading.Thread | None = None
        if interval is not None:
            watch = ref, self._ended, interval
            self._watchdog = threading.Thread(target=_watch, args=watch, name="specbuild-watchdog", daemon=True)
            self._watchdog.start()
        try:
            self._thread.start()
        except RuntimeError:
            self._ended.set()
            raise

    def wake(self, driven: Driven | None = None) -> None:
        """Tell the worker that there may be work; takes no lock, so that a finalizer may call it anywhere.

        `driven`: what is driven, if it must be kept alive until the work is done.
        """
        self._calls.put(driven)

    @property
    def here(self) -> bool:
        """Return whether the caller runs on one of these threads."""
        return threading.current_thread() in (self._thread, self._watchdog)

    def join(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for both threads to end; return whether the worker has ended."""
        if self._ended.wait(timeout):
            self._thread.join()
            if self._watchdog:
                self._watchdog.join()
        return self._ended.is_set()

    def doing(self) -> str:
        """Return where the worker is now: its innermost functions, on one line."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = traceback.extract_stack(frame)[-_FRAMES:] if frame else []
        return " > ".join(f"{each.name} ({each.filename}:{each.lineno})" for each in stack) or "nothing"


def _drive(ref: weakref.ref[Driven], calls: SimpleQueue[Driven | None], ended: threading.Event) -> None:
    patience: float | None = None
    try:
        while True:
            try:
                driven = calls.get(timeout=patience)
            except Empty:
                driven = None
            driven = driven or ref()
            if driven is None:
                return
            patience = driven.work()
            if driven.finish():
                return
            del driven
    finally:
        ended.set()


def _watch(ref: weakref.ref[Driven], ended: threading.Event, interval: float) -> None:
    while not ended.wait(interval):
        driven = ref()
        if driven is None:
            return
        interval = driven.watch()
        del driven
