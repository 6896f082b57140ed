"""A worker as its parent has it: asked for a case, watched, ended where it hangs, dies or takes too much memory."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

import psutil

from .outcome import Outcome
from .worker import READY, work

SETUP = 300.0  # seconds that preparing a class may take
LATE = 6  # times its limit, after which a case hangs whatever else the machine does
_POLL = 0.05  # seconds between two looks at what a worker uses


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bytes that a case may add to its worker; seconds without computing, late, after which it waits for no core."""

    growth: int = 2 << 30
    still: float = 5.0


@dataclass(frozen=True, slots=True)
class Case:
    """A class, which of its cases, and how many seconds it may take."""

    name: str
    number: int
    limit: float


class UnpreparedError(Exception):
    """A worker could not prepare a class: the campaign is broken, or the bundle, and no case was tried."""


class Worker:
    """One process at a time, replaced where it was ended; one case at a time."""

    def __init__(self, bench, seed, home, bounds):
        self.bench, self.seed, self.home, self.bounds = bench, seed, home, bounds
        self.place, self.log = home / "case", home / "log.txt"
        self.case: Case | None = None
        self.seconds = 0.0  # that the last case took, once it was prepared
        self._ready = False
        self._process: BaseProcess | None = None
        home.mkdir(parents=True, exist_ok=True)

    @property
    def prepares(self):
        """The class that is being prepared for the case under way."""
        return None if self._ready or self.case is None else self.case.name

    @property
    def pipe(self):
        """What to wait for."""
        return self._pipe

    def begin(self, case):
        """Hand over a case, to a new process where there is none."""
        if self._process is None or not self._process.is_alive():
            self._start()
        self.log.write_bytes(b"")
        self.case, self._ready, self._asked = case, False, time.monotonic()
        self._reset()
        with suppress(OSError):  # one that has just died: `poll` says so
            self._pipe.send((case.name, case.number))

    def poll(self):
        """The outcome once there is one."""
        outcome = self._answer()
        now = time.monotonic()
        if outcome is None and now - self._looked > _POLL:
            self._looked = now
            outcome = self._overdue(now)
        if outcome is not None:
            self.seconds, self.case = now - self._began, None
        return outcome

    def end(self):
        """End the process and whatever it started."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.join()
        self._pipe.close()
        self._process = None

    def keep(self, folder):
        """Copy what the case was made of, but for large files that are as they were."""
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.place.rglob("*")) if self.place.exists() else ():
            target = folder / path.relative_to(self.place)
            if path.is_symlink():
                target.symlink_to(path.readlink())
            elif path.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            elif path.is_fifo():
                os.mkfifo(target)
            elif path.stat().st_nlink == 1 and path.stat().st_blocks < 1 << 17:
                shutil.copyfile(path, target)

    def told(self):
        """The end of what the process printed."""
        return self.log.read_bytes()[-20_000:].decode(errors="replace") if self.log.exists() else ""

    def _start(self):
        self.end()
        os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")  # what an ended worker held
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        given = theirs, self.bench, self.seed, self.place, self.log
        self._process = context.Process(target=work, args=given, daemon=False)
        self._process.start()
        theirs.close()

    def _reset(self):
        self._began = self._looked = self._moved = time.monotonic()
        self._cpu = self._cpu_moved = 0.0
        self._rss: int | None = None

    def _answer(self):
        try:
            while self._pipe.poll():
                said = self._pipe.recv()
                if said != READY:
                    return said
                self._ready = True
                self._reset()
                self._rss, self._cpu = self._used()
        except (EOFError, OSError):
            return self._died()
        return None

    def _died(self):
        process = self._process
        assert process is not None
        process.join(5)
        code, told = process.exitcode, self.told()
        self.end()
        if not self._ready:
            raise UnpreparedError(f"a worker could not prepare {self.case and self.case.name}:\n{told}")
        what = signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
        return Outcome("crash", f"the process died of {what}", told)

    def _overdue(self, now):
        """The finding where a case has had too much time or memory; its process is gone then."""
        case = self.case
        assert case is not None
        if not self._ready:
            if now - self._asked > SETUP:
                self.end()
                raise UnpreparedError(f"a worker took more than {SETUP:.0f} s to prepare {case.name}:\n{self.told()}")
            return None
        rss, cpu = self._used()
        grown = rss - (self._rss or rss)
        if grown > self.bounds.growth:
            return self._stopped("memory", f"more than {self.bounds.growth >> 20} MiB")
        took = now - self._began
        if cpu - self._cpu_moved > 0.05:
            self._cpu_moved, self._moved = cpu, now
        if took < case.limit:
            return None
        computed, still = cpu - self._cpu, now - self._moved
        if computed >= case.limit or still >= self.bounds.still or took >= LATE * case.limit:
            return self._stopped("hang", f"no end after {case.limit:.0f} s")
        return None

    def _stopped(self, kind, detail):
        with suppress(ProcessLookupError):
            os.kill(self._process.pid or 0, signal.SIGUSR1)
        time.sleep(0.3)
        told = self.told()
        self.end()
        return Outcome(kind, detail, told)

    def _used(self):
        """Resident bytes and seconds of computing, of the process and those that it started."""
        rss, cpu = 0, 0.0
        with suppress(psutil.Error):
            process = psutil.Process(self._process.pid if self._process else None)
            for each in (process, *process.children(recursive=True)):
                with suppress(psutil.Error):
                    times = each.cpu_times()
                    rss += each.memory_info().rss
                    cpu += times.user + times.system + (times.children_user + times.children_system)
        return rss, cpu
