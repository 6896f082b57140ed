"""The cost of a round: the bundle's timing table, corrected by the seconds of recent steps.

A table is measured once, on a quiet machine; the machine that decodes may be busy, throttled or another. So each
bucket of steps has a moving average of its steps' log ratios to the table. A bucket that was not seen for long is taken
to cost what the table says, or less if all steps do: so it is tried again. No token depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from .acceptance import MAX_RATIO, MEMORY
from .sessions import PROBES
from .timing_table import Times, TimingTable, seconds_at

FRESH = 48  # steps of other buckets after which a bucket is mostly forgotten

Part = Literal["verify", "draft"]


@dataclass(slots=True)
class _Average:
    """A moving average of log ratios; `weight`: how many steps it stands for, `last`: the number of the newest one."""

    value: float = 0.0
    weight: float = 0.0
    last: int = 0

    def freshness(self, step: int) -> float:
        """Return how much it still says at a later step, 0 to 1."""
        return math.exp((self.last - step) / FRESH)

    def record(self, ratio: float, step: int) -> None:
        """Add a step's log ratio."""
        self.weight = min(self.weight * self.freshness(step) + 1, 1 / (1 - MEMORY))
        self.value, self.last = self.value + (ratio - self.value) / self.weight, step


@dataclass(slots=True)
class CostModel:
    """Seconds of an engine's steps and rounds. Only the worker records; any thread may read `correction`.

    Attributes:
        table: The bundle's timing table.
        batch_size: Sequences that the engine decodes at once.
        padded: Whether a step has as many nodes of every sequence as of the one that drafts most, as on a device.
        corrected: Whether the table is corrected.
    """

    table: TimingTable
    batch_size: int = 1
    padded: bool = False
    corrected: bool = True
    _buckets: dict[tuple[Part, int], _Average] = field(default_factory=dict)
    _all: _Average = field(default_factory=_Average)
    _factors: dict[tuple[Part, int], float] = field(default_factory=dict)

    def times(self, sampled: bool = False) -> Times:
        """Return the table's times for the batch size, as they were measured."""
        return self.table.at(self.batch_size, sampled)

    def record(self, part: Part, rows: int, seconds: float, steps: int = 1) -> None:
        """Record what `steps` steps of `rows` rows took together."""
        times = self.times()
        table, once = (times.verify, 0.0) if part == "verify" else (times.draft, times.once)
        expected = steps * (once + seconds_at(table, rows))
        if not (self.corrected and seconds > 0 and expected > 0):
            return
        ratio = math.log(min(max(seconds / expected, 1 / MAX_RATIO), MAX_RATIO))
        key = part, _bucket(rows)
        if (bucket := self._buckets.get(key)) is None:
            self._buckets[key] = _Average()  # a bucket's first step binds buffers, and does not count
            return
        self._factors.clear()
        step = self._all.last + 1
        for average in (bucket, self._all):
            average.record(ratio, step)

    @property
    def correction(self) -> float:
        """Seconds of recent steps over what the table says."""
        return math.exp(self._all.value)

    def factor(self, part: Part, rows: int) -> float:
        """Return what the table's seconds of a step of `rows` rows are multiplied with."""
        key = part, _bucket(rows)
        if (factor := self._factors.get(key)) is None:
            average, unknown = self._buckets.get(key) or _Average(), min(self._all.value, 0.0)
            fresh = average.freshness(self._all.last) if average.weight else 0.0
            factor = self._factors[key] = math.exp(unknown + fresh * (average.value - unknown))
        return factor

    def of_round(self, sequences: int, sampled: bool = False) -> RoundCost:
        """Return the prices of one round.

        Args:
            sequences: Sequences in its step.
            sampled: Whether any of them samples.
        """
        return RoundCost(self, self.times(sampled), sequences)


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Seconds of one round's parts."""

    model: CostModel
    times: Times
    sequences: int

    def verify(self, nodes: int, most: int = 0, drafts: bool = True) -> float:
        """Return the seconds of a step that verifies `nodes` drafted nodes, and of the loop's own work around it.

        Args:
            nodes: Drafted nodes of all sequences.
            most: Drafted nodes of the sequence that drafts most; a padded step has as many of each.
            drafts: Whether the loop handles trees.
        """
        times, rows = self.times, self.sequences + nodes
        if self.model.padded:
            rows = self.model.batch_size * (1 + most)
        own = (times.round if drafts else times.plain) * self.sequences / times.batch_size
        return seconds_at(times.verify, rows) * self.model.factor("verify", rows) + own * self.model.correction

    @property
    def plain(self) -> float:
        """Seconds of the round if nothing is drafted."""
        return self.verify(0, drafts=False)

    @property
    def row(self) -> float:
        """Average seconds of one more row in a step of the target; 0 in a padded step, whose rows are paid already."""
        if self.model.padded:
            return 0.0
        first, last = self.sequences + 1, self.sequences + 7
        seconds = seconds_at(self.times.verify, last) - seconds_at(self.times.verify, first)
        return seconds / (last - first) * self.model.factor("verify", last)

    def draft(self, levels: int, backlogs: Sequence[int]) -> float:
        """Return the seconds of growing `levels` levels for sequences of which the model has `backlogs` to read."""
        if not levels:
            return 0.0
        times, count = self.times, len(backlogs)
        step = self.level(count) if not times.once else 0.0
        return times.once * self.model.factor("draft", count) + levels * step + sum(map(self.reading, backlogs))

    def reading(self, backlog: int) -> float:
        """Return a round's share of the seconds in which the draft model reads so many tokens: it is used for some."""
        seconds = self.times.draft
        return (seconds_at(seconds, 1 + backlog) - seconds_at(seconds, 1)) / PROBES[0]

    def level(self, rows: int) -> float:
        """Return the seconds of one level of draft trees, in a step of `rows` rows."""
        step = seconds_at(self.times.draft, rows) * self.model.factor("draft", rows)
        return step + self.times.level * self.model.correction * rows / self.times.batch_size


def _bucket(rows: int) -> int:
    """Return the bucket of a step, which steps of up to twice its rows share."""
    return max(rows - 1, 0).bit_length()
