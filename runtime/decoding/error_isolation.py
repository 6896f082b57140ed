"""Errors that end one sequence alone."""

from __future__ import annotations

from threading import current_thread, main_thread

from specbuild.runtime.requests.sequence import Sequence


def isolate(sequence: Sequence, error: BaseException) -> None:
    """End only this sequence with an error of its own part of a round; raise an interrupt, which ends all of them.

    Only the main thread receives interrupts: in another thread such an error came from a tokenizer or a constraint,
    whose panic is no Exception.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit) and current_thread() is main_thread():
        raise error
    sequence.fail(error)
