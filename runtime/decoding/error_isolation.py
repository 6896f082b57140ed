"""Errors that end one sequence alone."""

from __future__ import annotations

from contextlib import AbstractContextManager
from threading import current_thread, main_thread

from specbuild.runtime.requests.sequence import Sequence


class isolate_errors(AbstractContextManager[None]):  # noqa: N801
    """Lets an error raised inside end only this sequence; an interrupt ends all of them.

    Only the main thread receives interrupts: in another thread such an error came from a tokenizer or a constraint.
    """

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None:
            return False
        if isinstance(error, KeyboardInterrupt | SystemExit) and current_thread() is main_thread():
            return False
        self._sequence.fail(error)  # every BaseException: a tokenizer's panic is no Exception
        return True
