"""Steering: how much one model may draft so that its objectives are kept, and why.

It goes down where an objective is broken and speculation may be what breaks it, and up again in probes. Between two
levels it compares the tails: a level that brings nothing is left again, so speculation is not switched off for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from .objectives import Objective, Sample, Window

SHARES = (1.0, 0.5, 0.125, 0.0)  # of the nodes that rounds drafted before, by level
OFF = len(SHARES) - 1
SETTLE, DWELL = 3.0, 8.0  # seconds at a level until it is judged as broken, and as kept
HOLD, LONGEST = 60.0, 960.0  # seconds until a probe beside the same load: at first, and after many that failed
SAFE = 0.8  # of the objective: the tail at a level, of few requests, at which no less is to be drafted
HELPED, WORSE = 0.95, 1.05  # of another level's tail
BUSIER, QUIETER = 1.25, 0.5  # of the load before
PATIENCE = 60.0  # seconds until a level counts as kept at which nobody has ended
LATELY = 10.0  # seconds whose requests are the load


@dataclass(frozen=True, slots=True)
class Step:
    """Something to be said, and perhaps another level; `nodes`: that a sequence may draft, None: as many as ever."""

    level: int
    nodes: int | None
    message: str
    told: dict[str, Any] = field(default_factory=dict)
    changed: bool = True


@dataclass(frozen=True, slots=True)
class _Before:
    """The level that was left: an objective's tail there, the median time of a token, and requests a second.

    plain: seconds of a token by plain decoding, as far as known; where they have grown since, the machine is slower.
    """

    level: int
    objective: Objective
    tail: float | None
    pace: float
    load: float
    plain: float | None
    broken: bool


class Steering:
    """One model's level: 0 is everything that the operator allows, OFF plain decoding.

    plain: seconds of a token by plain decoding, by the timing table as it is corrected now; None: nobody knows.
    under_way: how many requests are.
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
        self._before: _Before | None = None  # while the level is on trial
        self._load = self._peak = self._drafted = 0.0

    def look(self) -> Step | None:
        """What is to be done now; call it about once a second."""
        now = self._clock()
        self._load = sum(each.finished >= now - LATELY for each in self.window.samples()) / LATELY
        if broken := self._broken():
            self._peak = max(self._peak, self._load)
            return self._when_broken(now, *broken) if now - self._since >= SETTLE else None
        if self._load < QUIETER * self._peak:
            self._due, self._hold, self._peak = min(self._due, now), HOLD, 0.0
        return self._when_kept(now) if now - self._since >= DWELL and self._told(now) else None

    def _told(self, now: float) -> bool:
        """Whether something is known of this level: requests have ended for each objective, or there are none."""
        ended = all(self.window.times(each, self._since) for each in self.objectives)
        return ended or not self._under_way() or now - self._since >= PATIENCE

    def _broken(self) -> tuple[Objective, float] | None:
        """The objective that is broken by most, and its tail; of requests of this level alone."""
        found = [(each, self.window.times(each, self._since)) for each in self.objectives]
        sure = not (self.level or self._before)  # to go down at all
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
        """Less is drafted since a while, and an objective is broken all the same."""
        ramps = objective.measured == "tpot" and self._load > BUSIER * before.load  # slots fill
        if not ramps and tail > objective.seconds and self._alike(before, objective, tail, HELPED):
            told = f"drafting less did not help: {objective.name} was {before.tail:.3g} s, is {tail:.3g} s"
            self._move(now, 0, None)
            return self._out_of_reach(now, objective, tail, told, changed=True)
        if self.level < OFF:
            return self._less(now, objective, tail, "still broken", before)
        self._due = now + self._hold
        return self._say("the objective is broken without speculation too", objective, tail)

    def _after_probe(self, now: float, before: _Before, objective: Objective, tail: float) -> Step | None:
        """More is drafted again since a while, and an objective is broken."""
        if before.broken and self._alike(before, objective, tail, WORSE, better=True):
            if self.level:
                return self._probe(now, objective, tail)
            return self._out_of_reach(now, objective, tail, "drafting less brought nothing")
        self._hold = min(2 * self._hold, LONGEST)
        self._due = now + self._hold
        self._move(now, before.level, None)
        return self._say("it broke again: drafting less", objective, tail, changed=True)

    def _alike(self, before: _Before, objective: Objective, tail: float, share: float, better: bool = False) -> bool:
        """Whether this level is no faster than `share` of the other, or with `better` no slower.

        Where requests wait for others to end, tails grow whatever is drafted: then the time of a token counts too.
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
        """The median time of a token, of slow requests of this level or else of all; 0 where nobody has ended."""
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
        """Why speculation is not what makes requests slow; None where it may be."""
        if not self._drafted:
            return "nothing is drafted"
        plain = self._plain()
        if plain is None or cause_of(objective, samples) == "prompts":  # beside which less is drafted, more is read
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
        """What a sequence drafts at a level at most, where nothing else limits it."""
        share = int(SHARES[level] * self._drafted)
        return math.ceil(self._drafted) if not level else max(share, 1) if level < OFF else 0

    def _say(self, message: str, objective: Objective, tail: float | None, **more: Any) -> Step:
        changed = more.pop("changed", False)
        told = {"objective": objective.name, "seconds": objective.seconds, "tail": tail, "load": self._load, **more}
        return Step(self.level, self._nodes(self.level) if self.level else None, message, told, changed)


def cause_of(objective: Objective, samples: Sequence[Sample]) -> str:
    """What requests wait for: a slot ("queue"), their prompt's reading ("prompts"), or their tokens ("rounds")."""
    if objective.measured != "ttft" or not samples:
        return "rounds"
    slow = slow_of(objective, samples)
    return "queue" if fmean(each.queue for each in slow) > fmean(each.ttft for each in slow) / 2 else "prompts"


def slow_of(objective: Objective, samples: Sequence[Sample]) -> Sequence[Sample]:
    """Those that take longer than an objective, all where none does."""
    return [each for each in samples if (each.time(objective.measured) or 0.0) > objective.seconds] or samples
