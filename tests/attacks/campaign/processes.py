"""The command as a process: begun, sent a signal, and held to what it promises when it ends."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from .outcome import Fault

COMMAND = str(Path(sys.executable).with_name("specbuild"))
PATIENCE = 10.0  # seconds of computing after a signal, or six times as many without any
TRACEBACK = re.compile(r'Traceback \(most recent call last\)|File "[^"]*", line \d+|a bug in specbuild|panicked at')

LIBC_ABORT = 127  # the C library's own status where it has no memory for a thread
GAVE_UP = re.compile(  # a library, by itself
    r"memory allocation|bad_alloc|OpenBLAS|pthread_create|cannot allocate|unable to allocate|thread creation failed"
    r"|terminate called|error while loading shared libraries",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended: its status, negative where a signal ended it, and what it wrote."""

    status: int
    out: str
    err: str
    seconds: float


class Process:
    """`specbuild …` in a folder of its own, for as long as a case takes."""

    def __init__(self, given, place, limits=()):
        """`limits`: of `resource`, set for the process alone."""

        def limited():
            for kind, most in limits:
                resource.setrlimit(kind, (most, most))

        self.given, self._files = list(given), (place / "stdout.txt", place / "stderr.txt")
        with self._files[0].open("ab") as out, self._files[1].open("ab") as err:
            self._began = time.monotonic()
            self._process = subprocess.Popen(
                [COMMAND, *given],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=place,
                preexec_fn=limited if limits else None,
            )
        self._psutil = psutil.Process(self._process.pid)

    def signal_after(self, seconds, number):
        """Send a signal unless it has ended by then; whether one was sent."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.kill(self._process.pid, number)
            return True
        return False

    def ended(self, limit=PATIENCE):
        """Wait until it has ended; a Fault where it has not after so many seconds of computing."""
        began, first = time.monotonic(), self._cpu()
        while self._process.poll() is None:
            time.sleep(0.02)
            waited = time.monotonic() - began
            if waited > limit and (self._cpu() - first > limit or waited > 6 * limit):
                self._process.kill()
                self._process.wait()
                raise Fault("hang", f"{self._told()} had not ended after {waited:.0f} s: {self._text(1)[-500:]}")
        return Ended(self._process.returncode, self._text(0), self._text(1), time.monotonic() - self._began)

    def _cpu(self):
        try:
            times = self._psutil.cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    def _told(self):
        return f"specbuild {' '.join(self.given)[:200]}"

    def _text(self, which):
        return self._files[which].read_text(encoding="utf-8", errors="replace")

    def hold(self, ended, allowed, starved=False):
        """Raise Fault for a status that was not promised, a traceback, or an error that says nothing.

        `starved`: there was too little memory, and a library that cannot go on may end the process in its own words.
        """
        gave_up = ended.status in (1, LIBC_ABORT, -signal.SIGABRT) and GAVE_UP.search(ended.err)
        if starved and gave_up and "a bug in specbuild" not in ended.err:
            return
        said = f"{self._told()}: {ended.err[-600:]!r}"
        if ended.status < 0 and ended.status not in allowed:
            raise Fault("crash", f"died of {signal.Signals(-ended.status).name}: {said}")
        if ended.status not in allowed:
            raise Fault("raw", f"ended with {ended.status}, not {', '.join(map(str, allowed))}: {said}")
        if ended.status >= 0 and TRACEBACK.search(ended.err):
            raise Fault("raw", f"printed a traceback: {said}")
        errors = [line for line in ended.err.splitlines() if line.startswith("specbuild: ")]
        if ended.status in (1, 2) and not errors:
            raise Fault("raw", f"said nothing for status {ended.status}: {said}")
