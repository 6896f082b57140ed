"""Objectives: how long requests may take, and whether the slowest of the latest ones keep to it."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from specbuild.runtime import RequestMetrics
from specbuild.runtime.errors import OptionError, shown

COUNT, SECONDS = 512, 30.0  # samples of a window, and their age, at most
ALPHA = 1e-3  # how likely it is that as many are slow by chance where the objective is just met, when it is broken
ROBUST = 3  # slowest samples of which the tail is the fastest, once there are enough
Measured = Literal["ttft", "tpot", "e2el"]
_FORM = "ttft=0.5,tpot=0.05,p99: times in seconds (ttft, tpot, e2el), then the percentiles that they are of"
_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d{1,3})?)")


@dataclass(frozen=True, slots=True)
class Objective:
    """A share of requests, `quantile`, has this time or a shorter one."""

    measured: Measured
    seconds: float
    quantile: float

    @property
    def name(self) -> str:
        """As metrics label it: ttft_p99."""
        return f"{self.measured}_p{100 * self.quantile:.6g}"

    def broken(self, times: Sequence[float], sure: bool = True, part: float = 1.0) -> bool:
        """Whether the tail is slower; `sure`: too many are for that to be chance, by a binomial test.

        part: of the time, that the tail may have where it need not be sure.
        """
        slow, count, share = sum(each > self.seconds for each in times), len(times), 1 - self.quantile
        if not sure:
            return (self.tail(times) or 0.0) > part * self.seconds
        fewer = sum(math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(slow))
        return 1 - fewer < ALPHA

    def tail(self, times: Sequence[float]) -> float | None:
        """The time at its quantile; of few samples not the slowest alone, but as robust as so many can be."""
        count = len(times)
        if not count:
            return None
        slowest = max(math.ceil(round((1 - self.quantile) * count, 6)), min(ROBUST, 1 + count // 8))
        return sorted(times)[-slowest]

    def attainment(self, times: Sequence[float]) -> float:
        """The share that keeps to it; 1 where there are none."""
        return sum(each <= self.seconds for each in times) / len(times) if times else 1.0


def parse(texts: Sequence[str]) -> tuple[Objective, ...]:
    """Objectives as `--slo` has them; raises OptionError.

    A percentile is of the times before it, back to the last percentile; several may follow each other. Without one
    they are of the 99th.
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
    """A part such as ttft=0.5."""
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
    """A request that has ended: its times in seconds, and what it drafted; `tpot`: None of one token."""

    submitted: float
    started: float
    finished: float
    ttft: float
    queue: float
    tpot: float | None
    rounds: int = 0  # that drafted
    nodes: int = 0  # drafted

    @classmethod
    def of(cls, own: RequestMetrics) -> Sample | None:
        """By a result's metrics; None where it never came to its first token."""
        if own.submitted is None or own.started is None or own.first_token is None or own.finished is None:
            return None
        told, tpot = own.speculative_decoding, own.tpot if own.num_output_tokens > 1 else None
        times = own.submitted, own.started, own.finished, own.ttft, own.queue_time, tpot
        return cls(*times, told.num_spec_steps, told.num_draft_tokens)

    def time(self, measured: Measured) -> float | None:
        """The time that an objective is about."""
        return self.finished - self.submitted if measured == "e2el" else getattr(self, measured)


class Window:
    """The latest samples; `clock`: the one that their times are of."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._samples = clock, deque[Sample](maxlen=COUNT)

    def add(self, sample: Sample) -> None:
        """Another request has ended."""
        self._samples.append(sample)

    def samples(self, since: float = -math.inf) -> list[Sample]:
        """Those that are young enough and had their slot since then."""
        oldest = self._clock() - SECONDS
        return [each for each in self._samples if each.finished >= oldest and each.started >= since]

    def times(self, objective: Objective, since: float = -math.inf) -> list[float]:
        """What an objective is held against: of decoding, those who had their slot since then, else who came since."""
        found = self.samples(since)
        if objective.measured != "tpot":
            found = [each for each in found if each.submitted >= since]
        return [time for each in found if (time := each.time(objective.measured)) is not None]
