"""Latency objectives: how long requests may take, and how many of them may take longer."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from specbuild.runtime.errors import OptionError, shown

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
