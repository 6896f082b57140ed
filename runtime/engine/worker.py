"""The worker: the one thread that drives a scheduler's loop, and the watchdog beside it.

While there is nothing to do neither of them holds the scheduler, so that one which nobody else has is freed.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from queue import Empty, SimpleQueue
from typing import Protocol

_FRAMES = 3  # of the worker's stack that are told where it is stuck


class Driven(Protocol):
    """What a worker drives; it wakes its worker with itself when nobody has it any more."""

    def work(self) -> float | None:
        """Do what there is to do; seconds until there may be more by itself, None: for ever. Never raises."""
        ...

    def finish(self) -> bool:
        """Whether all is over; then everything is freed. Never raises."""
        ...

    def watch(self) -> float:
        """Look whether the worker makes progress; seconds until the next look."""
        ...


class Worker:
    """Two daemon threads; `interval`: seconds until the watchdog first looks, None: there is none."""

    def __init__(self, driven: Driven, interval: float | None) -> None:
        """Starts them; raises RuntimeError where the system has no thread to give."""
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
        """There may be something to do. Takes no lock, so a finalizer may call it wherever it runs.

        `driven`: what is driven, to live until it is done.
        """
        self._calls.put(driven)

    @property
    def here(self) -> bool:
        """Whether the caller is one of these threads."""
        return threading.current_thread() in (self._thread, self._watchdog)

    def join(self, timeout: float) -> bool:
        """Wait until both have ended; whether they have."""
        if self._ended.wait(timeout):
            self._thread.join()
            if self._watchdog:
                self._watchdog.join()
        return self._ended.is_set()

    def doing(self) -> str:
        """Where the worker is now: the innermost functions, on one line."""
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
