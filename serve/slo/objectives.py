"""Latency objectives: how long requests may take, and whether the slowest of the latest requests keep to it."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from specbuild.runtime import RequestMetrics
from specbuild.runtime.errors import OptionError, shown

COUNT, SECONDS = 512, 30.0  # maximum number and age of a window's samples
ALPHA = 1e-3  # significance level of the test whether an objective is broken
ROBUST = 3  # with enough samples the tail is no slower than the third slowest
Measured = Literal["ttft", "tpot", "e2el"]
_FORM = "ttft=0.5,tpot=0.05,p99: times in seconds (ttft, tpot, e2el), then the percentiles that they are of"
_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d{1,3})?)")


@dataclass(frozen=True, slots=True)
class Objective:
    """At least the share `quantile` of requests takes at most this time."""

    measured: Measured
    seconds: float
    quantile: float

    @property
    def name(self) -> str:
        """Label in metrics, such as ttft_p99."""
        return f"{self.measured}_p{100 * self.quantile:.6g}"

    def broken(self, times: Sequence[float], sure: bool = True, part: float = 1.0) -> bool:
        """Return whether more times are slower than the objective allows.

        Args:
            times: Seconds of requests.
            sure: Use a binomial test, so that chance does not explain it; else compare the tail.
            part: Without `sure`: the share of the objective's time that the tail may take.
        """
        slow, count, share = sum(each > self.seconds for each in times), len(times), 1 - self.quantile
        if not sure:
            return (self.tail(times) or 0.0) > part * self.seconds
        fewer = sum(math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(slow))
        return 1 - fewer < ALPHA

    def tail(self, times: Sequence[float]) -> float | None:
        """Return the time at the quantile, which with few samples does not rest on the slowest alone; None if empty."""
        count = len(times)
        if not count:
            return None
        slowest = max(math.ceil(round((1 - self.quantile) * count, 6)), min(ROBUST, 1 + count // 8))
        return sorted(times)[-slowest]

    def attainment(self, times: Sequence[float]) -> float:
        """Return the share of times that keep to the objective; 1 if there are none."""
        return sum(each <= self.seconds for each in times) / len(times) if times else 1.0


def parse(texts: Sequence[str]) -> tuple[Objective, ...]:
    """Parse objectives as `--slo` has them; raises OptionError.

    A percentile applies to the times before it, back to the last percentile; several may follow each other. Without one
    the 99th applies.
    """
    found, twice = list[Objective](), False
    for text in texts:
        times, quantiles = dict[Measured, float](), list[float]()
        for part in [*(each.strip() for each in str(text).split(",")), ""]:
            percentile = _PERCENTILE.fullmatch(part)
            if percentile:
                quantiles.append(float(percentile[1]) / 100)
                if not times or not quantiles[-1]:
                    raise OptionError(f"slo {shown(text)}: {part} is of no time before it: write {_FORM}")
                continue
            if quantiles or not part:
                found += [Objective(*each, quantile) for quantile in quantiles or [0.99] for each in times.items()]
                if not part and not times:
                    raise OptionError(f"slo {shown(text)} has no time: write {_FORM}")
                times, quantiles = {}, []
            if part:
                name, seconds = _time(text, part)
                twice = twice or name in times
                times[name] = seconds
    if twice or len({each.name for each in found}) < len(found):
        raise OptionError(f"slo {shown(','.join(texts))} has two times for one percentile: give one of them")
    return tuple(found)


def _time(text: str, part: str) -> tuple[Measured, float]:
    """Parse a part such as ttft=0.5."""
    name, _, value = (each.strip() for each in part.partition("="))
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if name not in get_args(Measured) or not 0 < seconds < math.inf:
        raise OptionError(f"slo {shown(text)}: {shown(part)} is no time and no percentile: write {_FORM}")
    return name, seconds  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Sample:
    """A request that has ended: its times in seconds, and what it drafted. `tpot`: None if it has a single token."""

    submitted: float
    started: float
    finished: float
    ttft: float
    queue: float
    tpot: float | None
    rounds: int = 0  # rounds that drafted
    nodes: int = 0  # drafted nodes

    @classmethod
    def of(cls, own: RequestMetrics) -> Sample | None:
        """Return the sample of a result's metrics; None if it has no first token."""
        if own.submitted is None or own.started is None or own.first_token is None or own.finished is None:
            return None
        told, tpot = own.speculative_decoding, own.tpot if own.num_output_tokens > 1 else None
        times = own.submitted, own.started, own.finished, own.ttft, own.queue_time, tpot
        return cls(*times, told.num_spec_steps, told.num_draft_tokens)

    def time(self, measured: Measured) -> float | None:
        """Return the time that an objective is about."""
        return self.finished - self.submitted if measured == "e2el" else getattr(self, measured)


class Window:
    """The latest samples; `clock`: the clock of their times."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._samples = clock, deque[Sample](maxlen=COUNT)

    def add(self, sample: Sample) -> None:
        """Add a request that has ended."""
        self._samples.append(sample)

    def samples(self, since: float = -math.inf) -> list[Sample]:
        """Return the samples that are recent enough and got their slot at or after `since`."""
        oldest = self._clock() - SECONDS
        return [each for each in self._samples.copy() if each.finished >= oldest and each.started >= since]

    def times(self, objective: Objective, since: float = -math.inf) -> list[float]:
        """Return the times that an objective is compared with.

        For TPOT of requests that got their slot since then; else of those that were submitted since then.
        """
        found = self.samples(since)
        if objective.measured != "tpot":
            found = [each for each in found if each.submitted >= since]
        return [time for each in found if (time := each.time(objective.measured)) is not None]
