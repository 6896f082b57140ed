"""Live timings: the timing table's seconds of steps and rounds, corrected by what they took lately.

A table is measured once, on a quiet machine; the machine that decodes may be busy, throttled or another. So each step's
seconds are compared with the table's. For each shape (a number of rows), the median of the last few ratios counts, and
shapes between two that were seen are interpolated. Plain decoding is the reference: a shape is assumed to have moved by
what plain decoding has moved since that shape was seen, and if other shapes move, plain decoding is measured again. An
engine's first step of a shape, which binds its buffers, is not counted. Old measurements are forgotten. No token
depends on any of this.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial, wraps
from statistics import median
from typing import Concatenate, Literal, ParamSpec

import numpy as np
from numpy.typing import NDArray

from .timings import Times, TimingTable, seconds_at

OWN, LAST = 5, 7  # number of ratios whose median counts: for a shape, and for the metric
SHRINK = 0.25  # weight of plain decoding's ratio when it is mixed with a shape's own, in ratios
FRESH = 128  # rounds after which a shape is forgotten
MOVED, FAR = 0.03, 0.2  # how far (in logarithms) a correction moves before it is applied: after PATIENCE, at once
PATIENCE = 32  # rounds between applying small changes
LARGEST = 4.0  # bound of a ratio's logarithm
GAP = 1.8  # how many times as long as plain decoding a round may promise to take, so that no gap is long
ADRIFT, PLAIN_AGE, PLAIN_ROUNDS = 0.1, 512, 3  # drift and age at which plain decoding is measured again; its rounds
WAITED = 1 / 8  # of such a round, for one that drafts all the same: a fixed tree's
LATER = 16  # reports worked off at once unless a policy asks: after a model's step caches are cold, and Python is slow
PerRow = NDArray[np.float64]
Part = Literal["verify", "draft", "own"]
P = ParamSpec("P")


@dataclass(slots=True)
class _Shape:
    """The time of one shape's steps over the table's, as the logarithm of the ratio."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=OWN))
    at: int = 0  # the round in which it was last seen
    own: float = 0.0  # the estimate
    then: float = 0.0  # plain decoding's estimate at that time
    told: float = 0.0  # the estimate that was applied
    anchor: float | None = None  # the estimate when plain decoding was last measured

    def record(self, seen: float, plain: float, now: int) -> float:
        """Add a ratio; return how far the estimate has moved since it was applied."""
        if now - self.at > FRESH or abs(plain - self.then) > ADRIFT:
            self.recent.clear()
        self.recent.append(seen)
        count = len(self.recent)
        ordered = sorted(self.recent)
        off, noise = ordered[count // 2] - plain, (ordered[-2] - ordered[1]) / 2 if count > 3 else 0.0
        off = math.copysign(max(abs(off) - noise, 0.0), off) * count / (count + SHRINK)
        self.own, self.then, self.at = plain + off, plain, now
        return abs(self.own - self.told)

    def fresh(self, now: int) -> bool:
        """Return whether a ratio was recorded, and not too long ago."""
        return bool(self.recent) and now - self.at <= FRESH

    def now(self, plain: float) -> float:
        """Return the estimate plus plain decoding's move since, as far as the estimate had not moved so before."""
        moved, before = plain - self.then, self.own - self.then
        if moved * before > 0:
            moved = math.copysign(max(abs(moved) - abs(before), 0.0), moved)
        return self.own + moved

    @property
    def adrift(self) -> bool:
        """Return whether the estimate has moved since plain decoding was last measured; ask right after `record`."""
        if self.anchor is None:
            self.anchor = self.own if len(self.recent) == OWN else None
        return self.anchor is not None and abs(self.own - self.anchor) > ADRIFT


class _Plain:
    """The time of plain decoding over the table's, in `own`: the reference, which moves as steps of equal rows do.

    Sequences come and go, so plain decoding has few rows and many, and a table may be wrong by another factor for each.
    """

    def __init__(self) -> None:
        self.own = self.told = 0.0
        self._shapes = dict[int, tuple[_Shape, float]]()  # each with `own` at the time

    def record(self, shape: int, seen: float, now: int) -> float:
        """Add a shape's ratio; return how far the estimate has moved since it was applied."""
        known = self._shapes.get(shape)
        one, then = known or (_Shape(), self.own)
        before = one.own + self.own - then if known else seen
        one.record(seen, before, now)
        self.own = self.own + one.own - before if self._shapes else seen
        self._shapes[shape] = one, self.own
        return abs(self.own - self.told)


class _Factors:
    """The correction factors of one part of a round, by shape."""

    def __init__(self) -> None:
        self.shapes = dict[int, _Shape]()

    def of(self, shapes: PerRow, now: int, plain: float) -> PerRow:
        """Return a factor for each shape: interpolated between seen shapes, beyond them the nearest one's."""
        seen = sorted((shape, one.now(plain)) for shape, one in self.shapes.items() if one.fresh(now))
        at, took = ([each[part] for each in seen] or [plain] for part in (0, 1))
        found: PerRow = np.exp(np.interp(shapes, np.array(at), np.array(took)))
        return found

    def of_kind(self, kind: int, now: int, plain: float, unseen: float) -> float:
        """Return the factor of one of a few kinds, which are never interpolated; `unseen` if it was not seen."""
        one = self.shapes.get(kind)
        return math.exp(one.now(plain)) if one and one.fresh(now) else unseen


def _later(report: Callable[Concatenate[LiveTimings, P], None]) -> Callable[Concatenate[LiveTimings, P], None]:
    """Let a report wait until `LiveTimings.settle`, or LATER of them; without live timings, ignore it."""

    @wraps(report)
    def keep(live: LiveTimings, /, *told: P.args, **named: P.kwargs) -> None:
        if live.on:
            live.reports.append(partial(report, live, *told, **named))
            if len(live.reports) >= LATER:
                live.settle()

    return keep


class LiveTimings:
    """An engine's table for its batch size, as its machine is now. Only the worker reports rounds, and asks for times.

    `said`, `took`: seconds of rounds so far, by the table and by the clock. They and `correction`, which any thread may
    read, may be without the last LATER reports.
    """

    def __init__(self, timings: TimingTable, lanes: int | None = None, on: bool = True, gap: float = GAP) -> None:
        """Start with a bundle's table, uncorrected.

        Args:
            timings: The bundle's timing table.
            lanes: Sequences that every step has room for; None: as many as are asked for.
            on: Whether the table is corrected.
            gap: How many times as long as plain decoding a round may promise to take.
        """
        self.timings, self.lanes, self.on, self.gap = timings, lanes, on, gap
        self.said = self.took = 0.0
        self._parts: dict[Part, _Factors] = {"verify": _Factors(), "draft": _Factors(), "own": _Factors()}
        self._now = 0
        self._version = 0
        self._steps = 0
        self._applied = 0
        self.reports = deque[Callable[[], None]]()
        self._made = dict[tuple[int, bool], tuple[int, Times]]()
        self._shares = dict[tuple[int, int], tuple[Times, Times]]()
        self._plain, self._plain_at, self._plain_due = _Plain(), 0, 0.0
        self._shape = _Shape()
        self._seen = 0.0
        self._last = (0, 0.0)
        self._verified = deque[float](maxlen=LAST)

    @property
    def correction(self) -> float:
        """Seconds of the target's recent steps over what the table says."""
        return math.exp(median(self._verified or [0.0]))

    def at(self, batch: int, temperature: float = 0.0) -> Times:
        """Return the table's corrected times for the engine's batch size, or for `batch` sequences if it has none."""
        self.settle()
        key, made = (self.lanes or batch, temperature > 0), self._made
        found = made.get(key)
        if found is None or found[0] != self._version:
            found = made[key] = self._version, self._corrected(self.timings.at(key[0], temperature))
        return found[1]

    def settle(self) -> None:
        """Work off what was reported."""
        while self.reports:
            self.reports.popleft()()

    def share(self, times: Times, rows: int, count: int) -> Times:
        """See `Times.share`; the last results are kept."""
        made = self._shares.get((rows, count))
        if made is None or made[0] is not times:
            made = self._shares[rows, count] = times, times.share(rows, count)
        return made[1]

    @_later
    def step(self, part: Literal["verify", "draft"], rows: int, seconds: float, count: int = 1) -> None:
        """Report what steps of the target or of the draft took.

        Args:
            part: "verify" for the target, "draft" for the draft.
            rows: Rows of a step, of all sequences and padding.
            seconds: Seconds of all the steps together.
            count: How many steps there were.
        """
        times = self.timings.at(self.lanes or 1)
        if part == "draft":
            self._steps += count
            expected = times.once or seconds_at(times.draft_rows, rows)
        else:
            expected = seconds_at(times.verify_rows, rows)
        shape = self._note(part, kind := shape_of(rows), count * expected, seconds)
        if part == "verify":
            self._shape, self._last = shape, (kind, self._seen)
            self._verified.append(self._seen)

    @_later
    def round(self, seconds: float, sequences: int, drafted: int, sampled: bool, grown: int = 1) -> None:
        """Report that a round is over in which all sequences decoded.

        Args:
            seconds: What the loop took beside the models: policy, sampler, commits and all; 0: not known.
            sequences: How many sequences decoded.
            drafted: Rows that their trees added to those of plain decoding.
            sampled: Whether any of them samples.
            grown: For how many of them the draft grew a tree.
        """
        times = self.timings.at(self.lanes or 1, float(sampled))
        steps, self._steps = self._steps, 0
        own = times.round if drafted else times.plain
        kind = 3 * sampled + (2 if steps else int(drafted > 0))
        self._note("own", kind, (own * sequences + steps * times.level * grown) / (self.lanes or 1), seconds)
        self._now += 1
        if due := self._plain_due:
            self._plain_due = max(due - (WAITED if drafted else 1), 0)
        elif drafted and (self._shape.adrift or self._now - self._plain_at > PLAIN_AGE):
            self._plain_due = PLAIN_ROUNDS
        if not drafted and self._shape.recent:
            self._apply(self._plain, self._plain.record(*self._last, self._now))
        if not drafted or (due and not self._plain_due):
            self._plain_at = self._now
            for each in self._parts["verify"].shapes.values():
                each.anchor = None
        if self._now % FRESH == 0:
            self._version += 1

    @_later
    def drafted_unseen(self, levels: int) -> None:
        """Note that the draft took so many steps that nobody timed."""
        self._steps += levels

    @_later
    def skip(self) -> None:
        """Ignore a round that prefilled, as it says nothing of the loop's own time."""
        self._steps = 0

    @property
    def plain_due(self) -> bool:
        """Return whether plain decoding has to be measured again, as the machine may have changed since it was seen."""
        self.settle()
        return self._plain_due > 0

    def _note(self, part: Part, shape: int, expected: float, seconds: float) -> _Shape:
        shapes = self._parts[part].shapes
        warm, one = shape in shapes, shapes.setdefault(shape, _Shape())  # a first step binds buffers
        if 1e-9 < seconds < 1e9 and expected > 1e-12:  # otherwise the clock is wrong
            self.said += expected
            self.took += seconds
            self._seen = min(max(math.log(seconds / expected), -LARGEST), LARGEST)
            if warm:
                self._apply(one, one.record(self._seen, self._plain.own, self._now))
        return one

    def _apply(self, shape: _Shape | _Plain, moved: float) -> None:
        """Rebuild the table at once for a large change, now and then for small ones: it costs a few tokens' choices."""
        if moved > FAR or (moved > MOVED and self._now - self._applied >= PATIENCE):
            self._version, self._applied, shape.told = self._version + 1, self._now, shape.own

    def _corrected(self, times: Times) -> Times:
        verify, draft, own = (self._parts[part] for part in ("verify", "draft", "own"))
        rows = times.verify_rows * verify.of(_shapes(len(times.verify_rows)), self._now, self._plain.own)
        draft_rows = times.draft_rows * draft.of(_shapes(len(times.draft_rows)), self._now, self._plain.own)
        kind, now = 3 * times.sampled, (self._now, self._plain.own)
        plain = own.of_kind(kind, *now, math.exp(self._plain.own))
        some, model = (own.of_kind(kind + each, *now, plain) for each in (1, 2))
        return replace(
            times,
            verify_rows=rows,
            verify=rows[:: times.lanes],
            draft_rows=draft_rows,
            draft=draft_rows[:: times.lanes] if len(draft_rows) > 1 else draft_rows,
            plain=times.plain * plain,
            round=times.round * some,
            level=times.level * model,
            once=times.once * float(draft.of(_shapes(3)[2:], self._now, self._plain.own)[0]),
        )


def shape_of(rows: int) -> int:
    """Return the shape of a step: its rows in half octaves."""
    return round(2 * math.log2(max(rows, 1)))


@cache
def _shapes(count: int) -> PerRow:
    found: PerRow = 2 * np.log2(np.maximum(np.arange(count), 1))
    return found
