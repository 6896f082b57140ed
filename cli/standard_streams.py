"""Standard input, output and error: opened if they were closed, flushed at the end, with lost output detected."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, TextIO


class _Output(io.FileIO):
    """A file descriptor that remembers its first write error and drops everything written after it."""

    def __init__(self, descriptor: int, raises: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.raises = raises
        self.lost: OSError | None = None

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        """Write data; raise the first failure only if `raises`."""
        if self.lost is None:
            try:
                return super().write(data)
            except OSError as error:
                self.lost = error
                if self.raises:
                    raise
        return len(data)


def prepare() -> None:
    """Open closed streams on /dev/null, so that no file gets their descriptors, and make any text printable."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = _writer(1, sys.stdout, raises=True)
    sys.stderr = _writer(2, sys.stderr, raises=False)  # a command does not fail because it cannot print messages


def tell(message: str) -> None:
    """Print a message as one line on standard error."""
    sys.stderr.write("specbuild: " + " ".join(message.split()) + "\n")
    sys.stderr.flush()


def lost() -> OSError | None:
    """Flush standard output and return its first write error, None if there was none."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    buffer = getattr(sys.stdout, "buffer", None)
    output = getattr(buffer, "raw", buffer)
    return output.lost if isinstance(output, _Output) else None


def _writer(descriptor: int, before: TextIO | None, raises: bool) -> TextIO:
    """Return a stream like the one before; text that is not valid Unicode, such as some paths, is escaped."""
    if before:
        before.flush()
    raw, unbuffered = _Output(descriptor, raises), bool(getattr(before, "write_through", False))
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),  # unbuffered under python -u
        encoding=before.encoding if before else "utf-8",
        errors="backslashreplace",
        line_buffering=before is None or before.isatty() or not raises,
        write_through=unbuffered,
    )
