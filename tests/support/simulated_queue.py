"""A server in simulated time: slots, a queue, rounds that take longer the more they verify, and what steers them."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from specbuild.serve.slo.draft_throttle import Steering, Step
from specbuild.serve.slo.objectives import Objective, Sample


@dataclass
class Request:
    submitted: float
    tokens: float
    started: float = 0.0
    first: float = 0.0
    made: float = 0.0
    rounds: int = 0
    nodes: int = 0


@dataclass
class SimulatedQueue:
    """`base`, `row`: seconds of a round, and of each row in it; `chance`: that a drafted token comes true."""

    objectives: tuple[Objective, ...]
    base: float = 0.02
    row: float = 0.001
    chance: float = 0.6
    tree: int = 8
    slots: int = 8
    knows: bool = True  # whether there is a timing table
    now: float = 0.0
    waiting: deque[Request] = field(default_factory=deque)
    active: list[Request] = field(default_factory=list)
    ended: list[tuple[float, Sample]] = field(default_factory=list)
    steps: list[tuple[float, Step]] = field(default_factory=list)
    levels: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self):
        plain = self.base + self.row * self.slots
        load = lambda: len(self.waiting) + len(self.active)  # noqa: E731
        self.steering = Steering(self.objectives, lambda: plain if self.knows else None, load, lambda: self.now)
        self._drawn, self._limit, self._looked = random.Random(5), 1 << 16, 0.0

    def run(self, seconds, rate, guarded=True, tokens=24):
        """So many requests a second, for so long."""
        end, coming = self.now + seconds, self.now + self._drawn.expovariate(rate) if rate else float("inf")
        while self.now < end:
            while coming <= self.now:
                self.waiting.append(Request(coming, tokens * self._drawn.uniform(0.5, 1.5)))
                coming += self._drawn.expovariate(rate)
            self._round(end)
            while guarded and self._looked + 1 <= self.now:
                self._looked += 1
                self._look()

    def _round(self, end):
        while self.waiting and len(self.active) < self.slots:
            self.active.append(self.waiting.popleft())
            self.active[-1].started = self.now
        if not self.active:
            self.now = min(self.now + 0.01, end)
            return
        nodes = min(self.tree, self._limit)
        self.now += self.base + self.row * self.slots * (1 + nodes * len(self.active) / self.slots)
        for each in list(self.active):
            accepted = 0
            while accepted < nodes and self._drawn.random() < self.chance:
                accepted += 1
            each.first = each.first or self.now
            each.made, each.rounds, each.nodes = each.made + 1 + accepted, each.rounds + bool(nodes), each.nodes + nodes
            if each.made >= each.tokens:
                self.active.remove(each)
                tpot = (self.now - each.first) / max(each.made - 1, 1)
                times = each.first - each.submitted, each.started - each.submitted, tpot
                sample = Sample(each.submitted, each.started, self.now, *times, each.rounds, each.nodes)
                self.ended.append((self.now, sample))
                self.steering.window.add(sample)

    def _look(self):
        if step := self.steering.look():
            self.steps.append((self.now, step))
            if step.changed:
                self._limit = 1 << 16 if step.nodes is None else step.nodes
        self.levels.append((self.now, self.steering.level))

    def tail(self, objective, since, until):
        """The plain quantile of whoever ended between two times."""
        times = sorted(s.time(objective.measured) or 0.0 for at, s in self.ended if since <= at < until)
        return times[min(int(objective.quantile * len(times)), len(times) - 1)]

    def level_at(self, time):
        return next(level for at, level in reversed(self.levels) if at <= time)
