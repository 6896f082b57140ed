"""Steering: how much one model may draft so that its latency objectives are kept.

The level goes down when an objective is broken and speculation may be the cause, and up again in probes. Steering
compares the tails of two levels and leaves a level that does not help, so speculation is not switched off in vain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from .objectives import Objective, Sample, Window

SHARES = (1.0, 0.5, 0.125, 0.0)  # by level: the share of the mean nodes per round at level 0 that may be drafted
OFF = len(SHARES) - 1
SETTLE, DWELL = 3.0, 8.0  # seconds at a level before it is judged broken, and kept
HOLD, LONGEST = 60.0, 960.0  # seconds until a probe at the same load: at first, and after many failed probes
SAFE = 0.8  # share of the objective that the tail may take after drafting less, since few requests make it uncertain
HELPED, WORSE = 0.95, 1.05  # ratios to another level's tail: at most HELPED is an improvement, above WORSE a regression
BUSIER, QUIETER = 1.25, 0.5  # ratios to an earlier load from which on the load counts as risen, and as fallen
PATIENCE = 60.0  # seconds until a level counts as kept although no request has ended at it
LATELY = 10.0  # seconds over which the load is measured


@dataclass(frozen=True, slots=True)
class Step:
    """A message to log and, if `changed`, a new level.

    nodes: nodes that a sequence may draft; None: the operator's limit. told: further fields of the log.
    """

    level: int
    nodes: int | None
    message: str
    told: dict[str, Any] = field(default_factory=dict)
    changed: bool = True


@dataclass(frozen=True, slots=True)
class _Before:
    """The level that was left: an objective's tail there, the median seconds per token, and the load in requests/s.

    plain: seconds per token of plain decoding then, if known; if they have grown since, the machine has become slower.
    broken: whether the objective was broken there.
    """

    level: int
    objective: Objective
    tail: float | None
    pace: float
    load: float
    plain: float | None
    broken: bool


class Steering:
    """Steers the level of one model: 0 is everything that the operator allows, OFF is plain decoding.

    Args:
        objectives: The objectives to keep; at least one.
        plain: Returns the seconds per token of plain decoding by the corrected timing table; None if unknown.
        under_way: Returns the number of requests in progress.
        clock: Returns seconds; the clock of the requests' times.
    """

    def __init__(
        self,
        objectives: Sequence[Objective],
        plain: Callable[[], float | None],
        under_way: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self.window, self.level, self.objectives = Window(clock), 0, objectives
        self._plain, self._under_way, self._clock = plain, under_way, clock
        self._since, self._due, self._hold = -math.inf, -math.inf, HOLD
        self._before: _Before | None = None  # set while the level is on trial
        self._load = self._peak = self._drafted = 0.0

    def look(self) -> Step | None:
        """Return the step to take now, if any; call it about once a second."""
        now = self._clock()
        self._load = sum(each.finished >= now - LATELY for each in self.window.samples()) / LATELY
        if broken := self._broken():
            self._peak = max(self._peak, self._load)
            return self._when_broken(now, *broken) if now - self._since >= SETTLE else None
        if self._load < QUIETER * self._peak:
            self._due, self._hold, self._peak = min(self._due, now), HOLD, 0.0
        return self._when_kept(now) if now - self._since >= DWELL and self._told(now) else None

    def _told(self, now: float) -> bool:
        """Return whether the level can be judged: each objective has ended requests, none run, or PATIENCE is over."""
        ended = all(self.window.times(each, self._since) for each in self.objectives)
        return ended or not self._under_way() or now - self._since >= PATIENCE

    def _broken(self) -> tuple[Objective, float] | None:
        """Return the objective exceeded by the largest factor, and its tail; counts requests of this level only."""
        found = [(each, self.window.times(each, self._since)) for each in self.objectives]
        sure = not (self.level or self._before)  # leaving level 0 takes statistical certainty
        share = SAFE if self._before and self._before.level < self.level < OFF else 1.0
        tails = [(each, each.tail(times) or 0.0) for each, times in found if each.broken(times, sure, share)]
        return max(tails, key=lambda each: each[1] / each[0].seconds, default=None)

    def _when_broken(self, now: float, objective: Objective, tail: float) -> Step | None:
        before, self._before = self._before, None
        if before and before.level < self.level:
            return self._after_less(now, before, objective, tail)
        if before:
            return self._after_probe(now, before, objective, tail)
        if now < self._due:
            return None
        if not self.level:
            samples = self.window.samples(self._since)
            self._drafted = sum(s.nodes for s in samples) / max(sum(s.rounds for s in samples), 1)
            cause = cause_of(objective, samples)
            if why := self._innocent(objective, tail, samples):
                return self._out_of_reach(now, objective, tail, why, cause=cause)
            return self._less(now, objective, tail, cause)
        if self.level < OFF:
            return self._less(now, objective, tail, "more load")
        return self._probe(now, objective, tail)

    def _after_less(self, now: float, before: _Before, objective: Objective, tail: float) -> Step | None:
        """Return the step for an objective that is broken while less drafting is on trial."""
        ramps = objective.measured == "tpot" and self._load > BUSIER * before.load  # more slots in use also cost time
        if not ramps and tail > objective.seconds and self._alike(before, objective, tail, HELPED):
            told = f"drafting less did not help: {objective.name} was {before.tail:.3g} s, is {tail:.3g} s"
            self._move(now, 0, None)
            return self._out_of_reach(now, objective, tail, told, changed=True)
        if self.level < OFF:
            return self._less(now, objective, tail, "still broken", before)
        self._due = now + self._hold
        return self._say("the objective is broken without speculation too", objective, tail)

    def _after_probe(self, now: float, before: _Before, objective: Objective, tail: float) -> Step | None:
        """Return the step for an objective that is broken while more drafting is on trial."""
        if before.broken and self._alike(before, objective, tail, WORSE, better=True):
            if self.level:
                return self._probe(now, objective, tail)
            return self._out_of_reach(now, objective, tail, "drafting less brought nothing")
        self._hold = min(2 * self._hold, LONGEST)
        self._due = now + self._hold
        self._move(now, before.level, None)
        return self._say("it broke again: drafting less", objective, tail, changed=True)

    def _alike(self, before: _Before, objective: Objective, tail: float, share: float, better: bool = False) -> bool:
        """Return whether this level takes more than `share` of the other's time, or with `better` at most that.

        Except for TPOT the time per token must agree, because tails grow with the queue whatever is drafted. If plain
        decoding has become slower since, `share` grows with it.
        """
        if before.objective != objective or before.tail is None:
            return False
        pairs, plain = [(tail, before.tail)], self._plain()
        if objective.measured != "tpot" and before.pace:
            pairs.append((self._pace(objective), before.pace))
        if plain and before.plain:
            share *= plain / before.plain
        return all((now <= share * then) if better else (now > share * then) for now, then in pairs)

    def _pace(self, objective: Objective) -> float:
        """Return the median seconds per token of this level's slow requests, or of all if none is slow; 0 if none."""
        samples = [each for each in self.window.samples(self._since) if each.tpot is not None]
        return median([s.tpot or 0.0 for s in slow_of(objective, samples)] or [0.0])

    def _when_kept(self, now: float) -> Step | None:
        before, self._before = self._before, None
        if before and before.level > self.level:
            self._hold, self._due = HOLD, now
        elif before:
            self._due = now + self._hold
        return self._probe(now) if self.level and now >= self._due else None

    def _innocent(self, objective: Objective, tail: float, samples: Sequence[Sample]) -> str | None:
        """Return why speculation cannot be the cause of slow requests; None if it may be."""
        if not self._drafted:
            return "nothing is drafted"
        plain = self._plain()
        # Less drafting leaves more rows of each step to prefill.
        if plain is None or cause_of(objective, samples) == "prompts":
            return None
        told, now = ("tail", tail) if objective.measured == "tpot" else ("median", self._pace(objective))
        return f"plain decoding takes {plain:.3g} s a token, and the {told} is {now:.3g} s" if now <= plain else None

    def _out_of_reach(self, now: float, objective: Objective, tail: float, why: str, **more: Any) -> Step:
        self._due = now + self._hold
        self._hold = min(2 * self._hold, LONGEST)
        return self._say(f"the objective is out of reach at this load: {why}", objective, tail, **more)

    def _less(self, now: float, objective: Objective, tail: float, cause: str, origin: _Before | None = None) -> Step:
        level = self.level + 1
        while level < OFF and self._nodes(level) >= self._nodes(level - 1):
            level += 1
        self._move(now, level, origin or self._left(objective, tail, broken=True))
        return self._say("the objective is broken: drafting less", objective, tail, cause=cause, changed=True)

    def _probe(self, now: float, objective: Objective | None = None, tail: float | None = None) -> Step:
        told, broken = objective or self.objectives[0], objective is not None
        tail = tail if broken else told.tail(self.window.times(told, self._since))
        self._move(now, self.level - 1, self._left(told, tail, broken))
        return self._say("probing: drafting more again", told, tail, changed=True)

    def _left(self, objective: Objective, tail: float | None, broken: bool) -> _Before:
        return _Before(self.level, objective, tail, self._pace(objective), self._load, self._plain(), broken)

    def _move(self, now: float, level: int, before: _Before | None) -> None:
        self.level, self._since, self._before = level, now, before

    def _nodes(self, level: int) -> int:
        """Return the maximum nodes that a sequence drafts at a level if nothing else limits it."""
        if not level:
            return math.ceil(self._drafted)
        return max(int(SHARES[level] * self._drafted), 1) if level < OFF else 0

    def _say(self, message: str, objective: Objective, tail: float | None, **more: Any) -> Step:
        changed = more.pop("changed", False)
        told = {"objective": objective.name, "seconds": objective.seconds, "tail": tail, "load": self._load, **more}
        return Step(self.level, self._nodes(self.level) if self.level else None, message, told, changed)


def cause_of(objective: Objective, samples: Sequence[Sample]) -> str:
    """Return what requests wait for: a slot ("queue"), their prefill ("prompts"), or their tokens ("rounds")."""
    if objective.measured != "ttft" or not samples:
        return "rounds"
    slow = slow_of(objective, samples)
    return "queue" if fmean(each.queue for each in slow) > fmean(each.ttft for each in slow) / 2 else "prompts"


def slow_of(objective: Objective, samples: Sequence[Sample]) -> Sequence[Sample]:
    """Return the samples slower than an objective, or all of them if none is."""
    return [each for each in samples if (each.time(objective.measured) or 0.0) > objective.seconds] or samples
