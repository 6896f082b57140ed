"""Signals that stop a command: Ctrl-C (SIGINT), and SIGTERM and SIGHUP, which ask a process to end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

STOPPED = "interrupted: nothing half-done was left behind"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN = 0.25  # seconds until an interrupt that has ended nothing comes again


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: it ends the program, where Ctrl-C may end less."""


def exit_at_once() -> None:
    """Until a command begins there is nothing to clean up: a signal prints one line and ends the process."""
    _handle(_exit)


def raise_exceptions() -> None:
    """From now on a signal raises KeyboardInterrupt, so that what was begun is cleaned up."""
    _handle(_raise)
    sys.unraisablehook = _unraisable


def ignore() -> None:
    """The command has ended: a signal changes nothing any more."""
    _handle(signal.SIG_IGN)
    handled()


def handled() -> None:
    """An interrupt has done its work without ending the command: it does not come again."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def interrupted(error: BaseException | None) -> bool:
    """Whether an exception is an interrupt, or what a library made of one."""
    while error and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _handle(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> None:
    """Signals that were ignored when the process began, as nohup has it, stay ignored."""
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def _exit(_signal: int, _frame: FrameType | None) -> None:
    try:
        os.write(2, f"specbuild: {STOPPED}\n".encode())
    finally:
        os._exit(1)


def _raise(number: int, _frame: FrameType | None) -> None:
    """Raise, but not into the cleaning up that an earlier signal has begun; and again until that has happened.

    Python drops what is raised in a destructor or a callback, and a library may drop anything.
    """
    signal.signal(signal.SIGALRM, lambda _, frame: _raise(number, frame))
    signal.setitimer(signal.ITIMER_REAL, _AGAIN)
    if not interrupted(sys.exc_info()[1]):
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _unraisable(unraisable: Any) -> None:
    """Say nothing of an interrupt that was dropped."""
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
