"""The campaign: workers that try one case after another, each class for an equal share of the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

from .attack import Bench
from .classes import limit
from .outcome import PASSED, REFUSED, Outcome
from .watch import Bounds, Case, Worker


@dataclass
class Tally:
    """What came of a class: how many cases passed, were refused, are findings, and their workers' seconds."""

    passed: int = 0
    refused: int = 0
    found: int = 0
    seconds: float = 0.0

    @property
    def cases(self):
        """All of them."""
        return self.passed + self.refused + self.found


@dataclass(frozen=True)
class Finding:
    """The first case of a fault, and where what it was made of is kept."""

    case: Case
    outcome: Outcome
    folder: Path


@dataclass
class Campaign:
    """Cases are drawn by `seed`, class and number alone; `found` is told of each new fault, `tried` of every case."""

    bench: Bench
    seed: int
    kept: Path  # where findings go
    found: Callable[[Finding, Campaign], None] = lambda finding, campaign: None
    tried: Callable[[Campaign], None] = lambda campaign: None
    workers: int = 2
    bounds: Bounds = field(default_factory=Bounds)
    tallies: dict[str, Tally] = field(default_factory=dict)
    findings: dict[str, list[Finding]] = field(default_factory=dict)  # by signature
    times: dict[str, int] = field(default_factory=dict)  # how often, by signature
    _next: dict[str, int] = field(default_factory=dict)
    _running: dict[str, int] = field(default_factory=dict)
    _busy: list[Worker] = field(default_factory=list)

    def run(self, classes, seconds):
        """Try cases of these classes, in turns, until the time is over."""
        last = time.monotonic() + seconds
        self._work(lambda: self._draw(classes) if time.monotonic() < last else None)

    def replay(self, cases):
        """Try these cases, in this order, in one worker."""
        left, self.workers = iter(cases), 1
        self._work(lambda: next((Case(name, number, limit(name)) for name, number in left), None))

    def _draw(self, classes):
        """The next case of the class that has had the least time; what runs now counts as its own last case did.

        A class is not prepared by two workers at once, of which one would wait for the other.
        """

        def spent(name):
            tally = self.tallies.setdefault(name, Tally())
            return tally.seconds + self._running.get(name, 0) * (1 + tally.seconds / max(tally.cases, 1))

        prepared = [name for name in classes if name not in {worker.prepares for worker in self._busy}]
        name = min(prepared or classes, key=spent)
        number = self._next[name] = self._next.get(name, -1) + 1
        return Case(name, number, limit(name))

    def _work(self, draw):
        homes = [self.bench.home / f"worker{n}" for n in range(self.workers)]
        workers = [Worker(self.bench, self.seed, home, self.bounds) for home in homes]
        idle, busy = list(workers), self._busy
        try:
            while True:
                while idle and (case := draw()):
                    self._running[case.name] = self._running.get(case.name, 0) + 1
                    idle[-1].begin(case)
                    busy.append(idle.pop())
                if not busy:
                    return
                wait([worker.pipe for worker in busy], timeout=0.05)
                for worker in list(busy):
                    case = worker.case
                    if case and (outcome := worker.poll()):
                        self._take(worker, case, outcome)
                        busy.remove(worker)
                        idle.append(worker)
        finally:
            busy.clear()
            for worker in workers:
                worker.end()

    def _take(self, worker, case, outcome):
        self._running[case.name] -= 1
        tally = self.tallies.setdefault(case.name, Tally())
        tally.seconds += worker.seconds
        tally.passed += outcome.kind == PASSED
        tally.refused += outcome.kind == REFUSED
        tally.found += outcome.found
        self.tried(self)
        if not outcome.found:
            return
        signature = f"{case.name}: {outcome.signature}"
        self.times[signature] = self.times.get(signature, 0) + 1
        known = self.findings.setdefault(signature, [])
        if len(known) < 3:
            folder = self.kept / f"{case.name.replace(':', '.')}-{case.number}"
            finding = Finding(case, outcome, folder)
            known.append(finding)
            worker.keep(folder / "input")
            self.found(finding, self)
