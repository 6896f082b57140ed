"""Ceilings: a canary candidate's objectives, each a maximum share of requests that may be slow, fail or be cut off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from specbuild.measure.trial import Metric
from specbuild.runtime.errors import OptionError, shown
from specbuild.serve.slo import objectives

SHARES = ("errors", "cut", "invalid")


@dataclass(frozen=True, slots=True)
class Ceiling:
    """At most the share `share` of requests may have a value `of`, see `observed`, above `above`.

    above: None if the value itself is a share.
    """

    name: str
    of: str
    above: float | None
    share: float

    @property
    def metric(self) -> Metric:
        """The metric of a trial that tests this ceiling."""
        return Metric(self.name, "share", ceiling=self.share)


def parse(texts: Sequence[str]) -> tuple[Ceiling, ...]:
    """Parse `--canary-objective`: shares such as errors=0.01, or times as in `objectives.parse`. Raises OptionError."""
    found, times = list[Ceiling](), list[str]()
    for text in texts:
        parts = [part.strip() for part in text.split(",")]
        for part in [each for each in parts if each.partition("=")[0].strip() in SHARES]:
            parts.remove(part)
            found.append(_share(part))
        times += [",".join(parts)] if parts else []
    try:
        timed = objectives.parse(times)
    except OptionError as error:
        raise OptionError(f"canary_objective {str(error).removeprefix('slo ')}") from None
    for each in timed:
        found.append(Ceiling(f"{each.name}<={each.seconds:g}", each.measured, each.seconds, 1 - each.quantile))
    if len({each.of if each.above is None else each.name for each in found}) < len(found):
        raise OptionError(f"canary_objective {shown(','.join(texts))} has a share twice: give it once")
    return tuple(found)


def _share(part: str) -> Ceiling:
    name, _, value = (each.strip() for each in part.partition("="))
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise OptionError(f"canary_objective {shown(part)} is no share of requests: give one above 0 and below 1")
    return Ceiling(f"{name}<={share:g}", name, None, share)


def held(ceilings: Sequence[Ceiling], values: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield the name of each ceiling that has a value, and how far the request breaks it: 0, 1, or a share between."""
    for each in ceilings:
        if (value := values.get(each.of)) is not None:
            yield each.name, value if each.above is None else float(value > each.above)
