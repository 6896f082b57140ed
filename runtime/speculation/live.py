"""What steps and rounds take now: the timing table's seconds, corrected by what they took lately.

A table is measured once, on a quiet machine; what decodes is busy, throttled or another. So each step's seconds are
held against the table's. Of each shape (a number of rows) the median of the last few ratios counts; shapes between two
that were seen lie between them. Plain decoding is what all is weighed against: what it has moved by since a shape was
seen, that shape has moved by too, and where other shapes move, plain decoding is measured again. What was long ago is
forgotten. No token depends on any of it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import median
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .timings import Times, TimingTable, seconds_at

OWN, LAST = 5, 7  # ratios whose median counts: of a shape, and for the metric
SHRINK = 0.25  # ratios of plain decoding's that a shape's own are mixed with
FRESH = 128  # rounds after which a shape is forgotten
MOVED, FAR = 0.03, 0.2  # how far, in logarithms, a correction moves before it is applied: in a while, at once
PATIENCE = 8  # rounds
LARGEST = 4.0  # of a ratio's logarithm
LEFT_WITHIN = 6  # rounds of a shape in which a machine that changed is seen
ADRIFT, PLAIN_AGE, PLAIN_ROUNDS = 0.1, 512, 3  # when plain decoding is measured again, and for how many rounds
PerRow = NDArray[np.float64]
Part = Literal["verify", "draft", "own"]


@dataclass(slots=True)
class _Shape:
    """What steps of one shape took over what the table says, in logarithms."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=OWN))
    at: int = 0  # the round of the last
    own: float = 0.0
    then: float = 0.0  # what plain decoding was then
    told: float = 0.0  # what was applied
    anchor: float | None = None  # what it took when plain decoding was measured last

    def record(self, seen: float, plain: float, now: int) -> float:
        """One more; how far it has moved since it was applied."""
        if now - self.at > FRESH or abs(plain - self.then) > ADRIFT:
            self.recent.clear()
        self.recent.append(seen)
        count = len(self.recent)
        ordered = sorted(self.recent)
        off, noise = ordered[count // 2] - plain, (ordered[-2] - ordered[1]) / 2 if count > 3 else 0.0
        off = math.copysign(max(abs(off) - noise, 0.0), off) * count / (count + SHRINK)
        self.own, self.then, self.at = plain + off, plain, now
        return abs(self.own - self.told)

    def now(self, plain: float) -> float:
        """As it was, and moved by what plain decoding has moved since, unless it had moved before."""
        moved, before = plain - self.then, self.own - self.then
        if moved * before > 0:
            moved = math.copysign(max(abs(moved) - abs(before), 0.0), moved)
        return self.own + moved

    @property
    def adrift(self) -> bool:
        """Whether it takes another time than after plain decoding was measured last; it was just seen."""
        if self.anchor is None:
            self.anchor = self.own if len(self.recent) == OWN else None
        return self.anchor is not None and abs(self.own - self.anchor) > ADRIFT


class _Factors:
    """One part's."""

    def __init__(self) -> None:
        self.shapes = dict[int, _Shape]()

    def of(self, shapes: PerRow, now: int, plain: float) -> PerRow:
        """The factor of each of some shapes, straight between those that were seen, beyond them that of the nearest."""
        seen = sorted((shape, one.now(plain)) for shape, one in self.shapes.items() if now - one.at <= FRESH)
        at, took = ([each[part] for each in seen] or [plain] for part in (0, 1))
        found: PerRow = np.exp(np.interp(shapes, np.array(at), np.array(took)))
        return found

    def of_kind(self, kind: int, now: int, plain: float) -> float:
        """The factor of one of a few kinds, of which nothing is between two."""
        one = self.shapes.get(kind)
        return math.exp(one.now(plain) if one and now - one.at <= FRESH else plain)


class LiveTimings:
    """An engine's: the table of its batch size, as its machine is now. The worker alone tells it of rounds.

    `said`, `took`: seconds of all rounds so far, by the table and by the clock. `likely`: by the corrected table.
    """

    def __init__(self, timings: TimingTable, lanes: int | None = None, on: bool = True) -> None:
        """`lanes`: sequences that every step has room for; None: as many as are asked for. `on`: else the table's."""
        self.timings, self.lanes, self.on = timings, lanes, on
        self.said = self.took = self.likely = 0.0
        self._parts: dict[Part, _Factors] = {"verify": _Factors(), "draft": _Factors(), "own": _Factors()}
        self._now = self._version = self._steps = self._applied = 0
        self._made = dict[tuple[int, bool], tuple[int, Times]]()
        self._shares = dict[tuple[int, int], tuple[Times, Times]]()
        self._plain, self._plain_at, self._plain_due = _Shape(), 0, 0
        self._shape, self._seen, self._last, self._verified = _Shape(), 0.0, 0.0, deque[float](maxlen=LAST)

    @property
    def correction(self) -> float:
        """What the target's steps take over what the table says, lately."""
        return math.exp(median(self._verified or [0.0]))

    def at(self, batch: int, temperature: float = 0.0) -> Times:
        """The table's times, corrected: of the engine's batch size, or of `batch` sequences where it has none."""
        if not self.on:
            return self.timings.at(self.lanes or batch, temperature)
        key, made = (self.lanes or batch, temperature > 0), self._made
        found = made.get(key)
        if found is None or found[0] != self._version:
            found = made[key] = self._version, self._corrected(self.timings.at(key[0], temperature))
        return found[1]

    def share(self, times: Times, rows: int, count: int) -> Times:
        """See `Times.share`."""
        made = self._shares.get((rows, count))
        if made is None or made[0] is not times:
            made = self._shares[rows, count] = times, times.share(rows, count)
        return made[1]

    def step(self, part: Literal["verify", "draft"], rows: int, seconds: float, count: int = 1) -> None:
        """Steps of the target or of the draft took so long, with so many rows of all sequences, fillers included."""
        if not self.on:
            return
        times = self.timings.at(self.lanes or 1)
        if part == "draft":
            self._steps += count
            expected = times.once or seconds_at(times.draft_rows, rows)
        else:
            expected = seconds_at(times.verify_rows, rows)
        shape = self._note(part, shape_of(rows), count * expected, seconds)
        if part == "verify":
            self._shape, self._last = shape, self._seen
            self._verified.append(self._seen)

    def round(self, seconds: float, sequences: int, drafted: int, sampled: bool, grown: int = 1) -> None:
        """A round is over, whose loop took so long beside the models: policy, sampler, commits and all.

        drafted: rows that the trees of all its sequences, who decode all of them, added to plain decoding's; grown: for
        how many of them the draft grew one.
        """
        if not self.on:
            return
        times = self.timings.at(self.lanes or 1, float(sampled))
        steps, self._steps = self._steps, 0
        own = times.round if drafted else times.plain
        kind = 3 * sampled + (2 if steps else 1 if drafted else 0)
        self._note("own", kind, (own * sequences + steps * times.level * grown) / (self.lanes or 1), seconds)
        self._now += 1
        if not drafted:
            self._plain_at, self._plain_due = self._now, max(self._plain_due - 1, 0)
            self._apply(self._plain, self._plain.record(self._last, self._plain.own, self._now))
            for each in self._parts["verify"].shapes.values():
                each.anchor = None
        elif not self._plain_due and (self._shape.adrift or self._now - self._plain_at > PLAIN_AGE):
            self._plain_due = PLAIN_ROUNDS
        if self._now % FRESH == 0:
            self._version += 1

    def skip(self) -> None:
        """A round that says nothing of the loop's own time: it read prompts."""
        self._steps = 0

    def rows_within(self, rows: int, times: float) -> int:
        """How many rows a step may have that takes so many times as long as one of `rows`; as many as were measured.

        By the table alone: it never falls, and a ratio of two of its steps is less of a machine's than they are.
        """
        seconds = self.timings.at(self.lanes or 1).verify_rows
        return int(np.searchsorted(seconds, times * seconds_at(seconds, rows), side="right")) - 1

    def plain(self, rows: int, sequences: int, temperature: float) -> float:
        """Seconds of a round of plain decoding as the machine is now, with so many rows, fillers included."""
        return self.at(sequences, temperature).of_round(rows, sequences, drafts=False)

    @property
    def plain_due(self) -> bool:
        """Whether plain decoding, which nobody has seen since the machine changed, is to be measured again."""
        return self.on and self._plain_due > 0

    def _note(self, part: Part, shape: int, expected: float, seconds: float) -> _Shape:
        one = self._parts[part].shapes.setdefault(shape, _Shape())
        if 1e-9 < seconds < 1e9 and expected > 1e-12:  # else it was no clock that said so
            self.said += expected
            self.took += seconds
            self._seen = min(max(math.log(seconds / expected), -LARGEST), LARGEST)
            self._apply(one, one.record(self._seen, self._plain.own, self._now))
            self.likely += expected * math.exp(one.own)
        return one

    def _apply(self, shape: _Shape, moved: float) -> None:
        """Small changes wait for each other: a table costs as much as a few tokens' choices."""
        if moved > FAR or (moved > MOVED and self._now - self._applied >= PATIENCE):
            self._version, self._applied, shape.told = self._version + 1, self._now, shape.own

    def _corrected(self, times: Times) -> Times:
        verify, draft, own = (self._parts[part] for part in ("verify", "draft", "own"))
        here = self._plain.own
        rows = times.verify_rows * verify.of(_shapes(len(times.verify_rows)), self._now, here)
        draft_rows = times.draft_rows * draft.of(_shapes(len(times.draft_rows)), self._now, here)
        plain, some, model = (own.of_kind(3 * times.sampled + each, self._now, here) for each in range(3))
        return replace(
            times,
            verify_rows=rows,
            verify=rows[:: times.lanes],
            draft_rows=draft_rows,
            draft=draft_rows[:: times.lanes] if len(draft_rows) > 1 else draft_rows,
            plain=times.plain * plain,
            round=times.round * some,
            level=times.level * model,
            once=times.once * float(draft.of(_shapes(3)[2:], self._now, here)[0]),
        )


def shape_of(rows: int) -> int:
    """Rows of a step in half octaves."""
    return round(2 * math.log2(max(rows, 1)))


@cache
def _shapes(count: int) -> PerRow:
    found: PerRow = 2 * np.log2(np.maximum(np.arange(count), 1))
    return found
