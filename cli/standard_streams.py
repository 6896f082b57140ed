"""Standard input, output and error: there from the beginning, and written out at the end, whatever became of them."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, TextIO


class _Output(io.FileIO):
    """A descriptor that remembers how writing to it failed, and drops all that comes later."""

    def __init__(self, descriptor: int, raises: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.raises = raises
        self.lost: OSError | None = None

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        """As any file's; the first failure is raised if asked."""
        if self.lost is None:
            try:
                return super().write(data)
            except OSError as error:
                self.lost = error
                if self.raises:
                    raise
        return len(data)


def prepare() -> None:
    """Open those that were closed as empty ones, so that no file gets their numbers; make any text printable."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this one
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = _writer(1, sys.stdout, raises=True)
    sys.stderr = _writer(2, sys.stderr, raises=False)  # what is done does not fail because it cannot be talked about


def tell(message: str) -> None:
    """One line on standard error."""
    sys.stderr.write("specbuild: " + " ".join(message.split()) + "\n")
    sys.stderr.flush()


def lost() -> OSError | None:
    """Write out what is buffered; why standard output was lost, if it was."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    buffer = getattr(sys.stdout, "buffer", None)
    output = getattr(buffer, "raw", buffer)
    return output.lost if isinstance(output, _Output) else None


def _writer(descriptor: int, before: TextIO | None, raises: bool) -> TextIO:
    """As the stream before was; a text that is not Unicode, like some paths, is printed with escapes."""
    if before:
        before.flush()
    raw, unbuffered = _Output(descriptor, raises), bool(getattr(before, "write_through", False))
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),  # as Python has it with -u
        encoding=before.encoding if before else "utf-8",
        errors="backslashreplace",
        line_buffering=before is None or before.isatty() or not raises,
        write_through=unbuffered,
    )
