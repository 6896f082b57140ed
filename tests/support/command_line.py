"""The command in this process."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

PROGRESS = re.compile(r"^specbuild: .* (so far|left)\n", re.M)  # of a machine that is slow


@dataclass(frozen=True)
class Outcome:
    """What a command left: its exit status, and what it wrote."""

    status: int
    out: str
    err: str

    def refusal(self, status=2):
        """The one line on stderr of a command that was refused."""
        assert (self.status, self.out) == (status, ""), self
        lines = [line for line in self.err.splitlines() if line]
        assert len(lines) == 1, lines
        assert lines[0].startswith("specbuild: "), lines
        assert "a bug in specbuild" not in lines[0], lines
        return lines[0]


@contextmanager
def own_signals():
    """What a command does with signals and destructors ends with this."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    hook = sys.unraisablehook
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook


@contextmanager
def redirected(stream, descriptor):
    """A stream's descriptor, 1 or 2, is another file while this lasts."""
    before = os.dup(stream)
    os.dup2(descriptor, stream)
    try:
        yield
    finally:
        os.dup2(before, stream)
        os.close(before)


@pytest.fixture
def specbuild(capfd, monkeypatch):
    """`specbuild("generate", …, stdin=b"")` runs the command in this process."""
    from specbuild.cli import main

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "argv", ["specbuild", *map(str, arguments)])
        for name in ("stdout", "stderr"):  # the command replaces them
            monkeypatch.setattr(sys, name, getattr(sys, name))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capfd.readouterr()
        with own_signals(), pytest.raises(SystemExit) as stop:
            main()
        code = stop.value.code
        assert isinstance(code, int)
        out, err = capfd.readouterr()
        return Outcome(code, out, PROGRESS.sub("", err))

    return run
