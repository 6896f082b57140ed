"""Errors that end one sequence alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread

from specbuild.runtime.requests.sequence import Sequence


@contextmanager
def isolate_errors(sequence: Sequence) -> Iterator[None]:
    """Let an error raised inside end only this sequence; an interrupt ends all of them.

    Only the main thread receives interrupts: in another thread such an error came from a tokenizer or a constraint.
    """
    try:
        yield
    except BaseException as error:  # a tokenizer's panic is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit) and current_thread() is main_thread():
            raise
        sequence.fail(error)
