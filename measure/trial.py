"""A trial of a candidate against a baseline: what is compared, how sure each difference is, and what follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from .evidence import FRACTIONS, Array, Scale, bernoulli, contrast, log_e, log_factors, start

Worse = Literal["higher", "lower", "either"]
Kind = Literal["promote", "hold", "rollback"]
MAX_LOG = 700.0  # of an e-process, so that it is a number of JSON


@dataclass(frozen=True, slots=True)
class Metric:
    """What is compared of requests.

    kind: "time" and "count" are above 0 and compared by their logarithms, "share" is in [0, 1], "number" is any.
    worse: which way is a regression. margin: the regression that a promotion must rule out (a difference of logarithms
    for times); None where a promotion asks for nothing. ceiling: of a share, an objective that the candidate's mean
    is held against, whatever the baseline's is; a promotion must prove that it is kept.
    """

    name: str
    kind: Literal["time", "count", "share", "number"]
    worse: Worse = "higher"
    margin: float | None = None
    ceiling: float | None = None

    @property
    def decides(self) -> bool:
        """Whether a promotion rests on it."""
        return self.margin is not None or self.ceiling is not None

    @property
    def by_logarithm(self) -> bool:
        """Whether values are compared by their logarithms."""
        return self.kind in ("time", "count")


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a metric: `harm` and `fine` are e-values; numbers and means are (baseline, candidate).

    harm: against "the candidate is no worse". fine: against "it is worse by the margin, or more"; None without one.
    Of an objective, against "the candidate keeps it", and against "it breaks it, or just keeps it".
    Means of times and counts are geometric; None of nothing.
    """

    metric: str
    harm: float
    fine: float | None
    n: tuple[int, int]
    means: tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows, and the evidence that decides it: for a rollback the worst metric, else the least settled one.

    e: what is held against 1/α: for a rollback the mean of all metrics' `harm`, else the least `fine`.
    """

    kind: Kind
    e: float
    evidence: Evidence

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Trial:
    """Evidence of metrics, request by request; arrays of any `shape` are as many trials side by side.

    Rolling back with no harm done has a probability of at most `alpha` in the whole trial: the mean of e-processes is
    one too. So has promoting with one margin exceeded. Both hold whenever it is looked at; see `evidence.contrast`.
    Of an objective harm is that the candidate's requests break it more often, given all before, than it allows.
    """

    def __init__(self, metrics: Sequence[Metric], alpha: float, shape: tuple[int, ...] = ()) -> None:
        self.metrics, self._bar = tuple(metrics), -np.log(alpha)
        whole = (*shape, len(self.metrics))
        self._log = np.array([metric.by_logarithm for metric in metrics])
        self._side = np.array([{"higher": 1, "lower": -1, "either": 0}[metric.worse] for metric in metrics])
        self._margin = self._side * np.array([metric.margin or 0.0 for metric in metrics])
        self._needed = np.array([metric.decides for metric in metrics])
        ceiling = np.array([np.nan if metric.ceiling is None else metric.ceiling for metric in metrics])
        self._held = ~np.isnan(ceiling)
        self._null = np.where(self._held, ceiling, 0.5)
        held = self._held[:, None]
        self._stakes = [np.where(held, bernoulli(null), FRACTIONS) for null in (self._null, 1 - self._null)]
        width = [1.0 if metric.kind == "share" else np.nan for metric in metrics]
        self._scale = Scale.of(np.broadcast_to(np.array(width), whole))
        self._up, self._down, self._fine = start(whole), start(whole), start(whole)
        self._n, self._sums = np.zeros((2, *whole)), np.zeros((2, *whole))

    def add(self, candidate: Array | bool, weight: Array | float, values: Array) -> None:
        """A request has ended: its values `[…, metrics]`, NaN for what it has not, and its draw (see `contrast`)."""
        a, w = np.asarray(candidate, np.float64)[..., None], np.asarray(weight, np.float64)[..., None]
        positive = np.where(values > 0, values, np.nan)
        values = np.where(self._log, np.log(positive), values)
        own = np.where(a > 0, values, np.nan)
        drawn = np.where(self._held, own, contrast(a, w, self._scale.score(values)))
        self._up += log_factors(drawn, self._null, "above", self._stakes[0])
        self._down += log_factors(drawn, self._null, "below", self._stakes[1])
        less = np.where(self._held, own, contrast(a, w, self._scale.score(values - a * self._margin)))
        mirrored = np.where(self._side > 0, 1 - less, less)
        self._fine += log_factors(mirrored, 1 - self._null, "above", self._stakes[1])
        self._scale.add(values)
        seen = ~np.isnan(values)
        for arm, share in enumerate((1 - a, a)):
            self._n[arm] += share * seen
            self._sums[arm] += share * np.where(seen, values, 0.0)

    def harm(self) -> Array:
        """The logarithm of each metric's e-process against "no worse", `[…, metrics]`."""
        up, down = log_e(self._up), log_e(self._down)
        return np.select([self._side > 0, self._side < 0], [up, down], np.logaddexp(up, down) - np.log(2))

    def fine(self) -> Array:
        """The same against "worse by the margin, or more"; for metrics without one it means nothing."""
        return log_e(self._fine)

    def rolled_back(self) -> Array:
        """Whether harm is proven."""
        return np.asarray(_log_mean(self.harm()) >= self._bar)

    def promoted(self) -> Array:
        """Whether no harm is proven, and every margin is kept."""
        kept = (self.fine() >= self._bar) | ~self._needed
        return np.asarray(kept.all(axis=-1) & np.logical_not(self.rolled_back()))

    def kind(self) -> Kind:
        """What follows, of a trial of shape ()."""
        return "rollback" if self.rolled_back() else "promote" if self.promoted() else "hold"

    def verdict(self) -> Verdict:
        """What follows and why, of a trial of shape ()."""
        harm, fine, rows = self.harm(), self.fine(), self.evidence()
        kind = self.kind()
        if kind == "rollback":
            return Verdict(kind, _number(_log_mean(harm)), rows[int(harm.argmax())])
        least = int(np.where(self._needed, fine, np.inf).argmin())
        return Verdict(kind, _number(fine[least]), rows[least])

    def evidence(self) -> list[Evidence]:
        """What is known of each metric, of a trial of shape ()."""
        harm, fine, n = self.harm(), self.fine(), self._n.astype(int)
        rows = []
        for place, metric in enumerate(self.metrics):
            means = [float(self._sums[arm, place] / n[arm, place]) if n[arm, place] else None for arm in (0, 1)]
            if metric.by_logarithm:
                means = [None if mean is None else float(np.exp(mean)) for mean in means]
            proven = _number(fine[place]) if self._needed[place] else None
            counts = int(n[0, place]), int(n[1, place])
            rows.append(Evidence(metric.name, _number(harm[place]), proven, counts, (means[0], means[1])))
        return rows

    def state(self) -> dict[str, Any]:
        """What `restore` takes, for JSON."""
        return {name: array.tolist() for name, array in self._arrays().items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; raises ValueError for one of other metrics."""
        for name, array in self._arrays().items():
            given = np.array(state[name], np.float64)
            if given.shape != array.shape or not np.isfinite(given).all():
                raise ValueError(f"{name} is of other metrics")
            array[...] = given

    def _arrays(self) -> dict[str, Array]:
        scale = self._scale
        scaled = {"count": scale.count, "center": scale.mean, "variance": scale.variance}
        bets = {"up": self._up, "down": self._down, "fine": self._fine}
        return {**bets, **scaled, "n": self._n, "sums": self._sums}


def _log_mean(logs: Array) -> Array:
    return np.asarray(np.logaddexp.reduce(logs, axis=-1) - np.log(logs.shape[-1]))


def _number(log: Array | float) -> float:
    return float(np.exp(min(float(log), MAX_LOG)))
