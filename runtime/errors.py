"""Every error specbuild raises on purpose.

    SpecbuildError            exit status 1: it failed, and not because of what was asked
    ├── ExecutionError        a compiled model could not be run, or gave what is no logits
    ├── EngineClosedError     an engine was used after it had been closed, or while it drains
    ├── QueueFullError        no room in an engine's queue, and the caller would not wait
    └── InputError            exit status 2: what was asked for cannot be done
        ├── OptionError       a flag, parameter, tree, precision or backend
        ├── PromptError       a prompt or a prompt file
        ├── CheckpointError   a model folder
        ├── BundleError       a bundle: missing, damaged, too new
        └── OutputError       a place to write to

The message is one line that says what is wrong and what to do about it.
"""

from __future__ import annotations

import reprlib

MAX_SHOWN = 80  # characters of a value in a message
MAX_MESSAGE = 400  # characters of another library's error in a message
MAX_LINE = 2000  # characters of a whole message
_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxstring, _repr.maxother = 2, MAX_SHOWN, MAX_SHOWN


def shown(value: object) -> str:
    """Return a value's repr on one short line for an error message, or its type's name if the repr fails."""
    try:
        return _cut(_repr.repr(value), MAX_SHOWN)
    except Exception:  # for example an int of more digits than Python prints
        return _cut(f"<{type(value).__name__}>", MAX_SHOWN)


def message_of(error: BaseException) -> str:
    """Return another library's error message as one line of bounded length; "" if `str` of the error fails."""
    try:
        return _cut(str(error), MAX_MESSAGE)
    except BaseException:  # another library's `__str__` may raise anything
        return ""


def _cut(text: str, length: int) -> str:
    text = " ".join(text[: 4 * length].split())
    return text if len(text) <= length else f"{text[: length - 1]}…"


class SpecbuildError(Exception):
    """The base of all errors raised on purpose: a message of one bounded line, and the CLI's `exit_status`."""

    exit_status = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(_cut(message, MAX_LINE))


class ExecutionError(SpecbuildError):
    """A backend could not run a compiled model, or the model gave NaN or infinity for the token to emit."""


class EngineClosedError(SpecbuildError):
    """An engine was used after it had been closed, or received a request while it drains."""


class QueueFullError(SpecbuildError):
    """An engine's queue was full, and the request was submitted with `wait=False`."""


class InputError(SpecbuildError):
    """The input or an option cannot be used; the base of all errors that the caller can fix."""

    exit_status = 2


class OptionError(InputError):
    """A flag, sampling parameter, tree, precision or backend that does not exist or is out of range."""


class PromptError(InputError):
    """A prompt, or a line of a prompt file, that cannot be used."""


class CheckpointError(InputError):
    """A model folder that is missing, damaged or of an unsupported kind."""


class BundleError(InputError):
    """A bundle that is missing, damaged, unsafe, or written by a newer specbuild."""


class OutputError(InputError):
    """An output folder that exists, cannot be written, or is full."""


def one_line(error: BaseException) -> str:
    """Return the first paragraph of another library's error as one line, with the error's type if it is one word."""
    text = " ".join(str(error).split("\n\n")[0].split())
    text = text if " " in text else f"{type(error).__name__} {text}".rstrip()
    return _cut(text, MAX_MESSAGE)
