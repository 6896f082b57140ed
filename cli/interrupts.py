"""Handling of the signals that stop a command: SIGINT (Ctrl-C), SIGTERM and SIGHUP."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

STOPPED = "interrupted: nothing half-done was left behind"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN = 0.25  # seconds after which an interrupt that ended nothing is raised again


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: it ends the program, whereas Ctrl-C may end only a part, such as an answer."""


def exit_at_once() -> None:
    """Make a signal print one line and end the process at once; for when there is nothing to clean up."""
    _handle(_exit)


def raise_exceptions() -> None:
    """Make a signal raise KeyboardInterrupt, so that unfinished work is cleaned up."""
    _handle(_raise)
    sys.unraisablehook = _unraisable


def ignore() -> None:
    """Ignore signals from now on, because the command has ended."""
    _handle(signal.SIG_IGN)
    handled()


def handled() -> None:
    """Acknowledge an interrupt that does not end the command, so that it is not raised again."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def interrupted(error: BaseException | None) -> bool:
    """Return whether an exception is an interrupt, or was raised by a library because of one."""
    while error and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _handle(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> None:
    """Set the handler of all three signals; those ignored when the process began, as under nohup, stay ignored."""
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def _exit(_signal: int, _frame: FrameType | None) -> None:
    try:
        os.write(2, f"specbuild: {STOPPED}\n".encode())
    finally:
        os._exit(1)


def _raise(number: int, _frame: FrameType | None) -> None:
    """Raise an interrupt, repeatedly until `handled`, but not into the clean-up that an earlier one began.

    It is repeated because Python drops exceptions raised in a destructor or a callback, and libraries may drop any.
    """
    signal.signal(signal.SIGALRM, lambda _, frame: _raise(number, frame))
    signal.setitimer(signal.ITIMER_REAL, _AGAIN)
    if not interrupted(sys.exc_info()[1]):
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _unraisable(unraisable: Any) -> None:
    """Report an unraisable exception, unless it is an interrupt, which is raised again anyway."""
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
