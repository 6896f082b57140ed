"""Ceilings: objectives of a canary's candidate, each the share of its requests that may be slow, fail or be cut off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from specbuild.measure.trial import Metric
from specbuild.runtime.errors import OptionError, shown

from . import objectives

SHARES = ("errors", "cut", "invalid")


@dataclass(frozen=True, slots=True)
class Ceiling:
    """At most a share `most` of requests has a value `of`, see `observed`, above `above`; None: values are shares."""

    name: str
    of: str
    above: float | None
    most: float

    @property
    def metric(self) -> Metric:
        """What a trial is told."""
        return Metric(self.name, "share", ceiling=self.most)


def parse(texts: Sequence[str]) -> tuple[Ceiling, ...]:
    """Ceilings as `--canary-objective` has them: errors=0.01, or times as in `objectives.parse`. Raises OptionError."""
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
        most = float(value)
    except ValueError:
        most = 0.0
    if not 0 < most < 1:
        raise OptionError(f"canary_objective {shown(part)} is no share of requests: give one above 0 and below 1")
    return Ceiling(f"{name}<={most:g}", name, None, most)


def held(ceilings: Sequence[Ceiling], values: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """What a request's values say of each ceiling: its name, and 1 where the request breaks it, else 0."""
    for each in ceilings:
        if (value := values.get(each.of)) is not None:
            yield each.name, value if each.above is None else float(value > each.above)
