"""Standard input, output and error: there from the beginning, and written out at the end, whatever became of them."""

from __future__ import annotations

import contextlib
import io
import os
import sys


def prepare() -> None:
    """Open those that were closed as empty ones, so that no file gets their numbers; make any text printable."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: PTH123, SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path need not be Unicode


def tell(message: str) -> None:
    """One line on standard error; none where nobody reads that any more."""
    with contextlib.suppress(OSError):
        sys.stderr.write("specbuild: " + " ".join(message.split()) + "\n")
        sys.stderr.flush()


def lost() -> OSError | None:
    """Write out what is buffered, and return why output was lost; what comes after a loss is dropped silently."""
    found: OSError | None = None
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            found = found or error
            with contextlib.suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
                stream.flush()
    return found
