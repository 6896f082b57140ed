"""A trial of a candidate against a baseline: the metrics, the evidence for each difference, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from .evidence import FRACTIONS, Array, Scale, bernoulli, contrast, log_e, log_factors, start

Worse = Literal["higher", "lower", "either"]
Kind = Literal["promote", "hold", "rollback"]
MAX_LOG = 700.0  # maximum logarithm of a reported e-value, so that JSON can represent it


@dataclass(frozen=True, slots=True)
class Metric:
    """A value of each request that a trial compares.

    kind: "time" and "count" are positive and compared by their logarithms, "share" is in [0, 1], "number" is any.
    worse: the direction of a regression. margin: the regression that a promotion must rule out (a difference of
    logarithms for times); None if promotion does not depend on the metric. ceiling: for a share, an objective that the
    candidate's mean must not exceed, whatever the baseline's is; a promotion must prove that it is met.
    """

    name: str
    kind: Literal["time", "count", "share", "number"]
    worse: Worse = "higher"
    margin: float | None = None
    ceiling: float | None = None

    @property
    def decides(self) -> bool:
        """Return whether a promotion depends on the metric."""
        return self.margin is not None or self.ceiling is not None

    @property
    def by_logarithm(self) -> bool:
        """Return whether values are compared by their logarithms."""
        return self.kind in ("time", "count")


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence on one metric: two e-values, and numbers of values and means as (baseline, candidate).

    harm: e-value against "the candidate is no worse". fine: e-value against "the candidate is worse by the margin or
    more"; None without a margin. For an objective: against "the candidate meets it", and against "the candidate
    exceeds or just meets it". Means of times and counts are geometric; None if there are no values.
    """

    metric: str
    harm: float
    fine: float | None
    n: tuple[int, int]
    means: tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision and the evidence behind it: for a rollback the worst metric, else the least settled one.

    e: the e-value compared with 1/α: for a rollback the mean of all metrics' `harm`, else the smallest `fine`.
    """

    kind: Kind
    e: float
    evidence: Evidence

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict for JSON."""
        return asdict(self)


class Trial:
    """Accumulates evidence on metrics, request by request; `shape` runs several trials side by side.

    The probability of a rollback although no harm is done is at most `alpha` over the whole trial, because the mean of
    e-processes is an e-process. The same bound holds for a promotion although a margin is exceeded. Both hold however
    often the trial is checked; see `evidence.contrast`. For an objective, harm means that the candidate's requests
    break it more often, given all earlier ones, than it allows.
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
        """Add a request that has ended.

        Args:
            candidate: Whether the request was drawn for the candidate.
            weight: The probability of that draw.
            values: The request's metrics, `[…, metrics]`; NaN for those that it lacks.
        """
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
        """Return the logarithm of each metric's e-process against "no worse", `[…, metrics]`."""
        up, down = log_e(self._up), log_e(self._down)
        return np.select([self._side > 0, self._side < 0], [up, down], np.logaddexp(up, down) - np.log(2))

    def fine(self) -> Array:
        """Return the same against "worse by the margin or more"; meaningless for metrics that do not decide."""
        return log_e(self._fine)

    def rolled_back(self) -> Array:
        """Return whether harm is proven."""
        return np.asarray(_log_mean(self.harm()) >= self._bar)

    def promoted(self) -> Array:
        """Return whether every margin and ceiling is proven to be kept and no harm is proven."""
        kept = (self.fine() >= self._bar) | ~self._needed
        return np.asarray(kept.all(axis=-1) & np.logical_not(self.rolled_back()))

    def kind(self) -> Kind:
        """Return the decision of a trial of shape ()."""
        if self.rolled_back():
            return "rollback"
        return "promote" if self.promoted() else "hold"

    def verdict(self) -> Verdict:
        """Return the verdict of a trial of shape ()."""
        harm, fine, rows = self.harm(), self.fine(), self.evidence()
        kind = self.kind()
        if kind == "rollback":
            return Verdict(kind, _number(_log_mean(harm)), rows[int(harm.argmax())])
        least = int(np.where(self._needed, fine, np.inf).argmin())
        return Verdict(kind, _number(fine[least]), rows[least])

    def evidence(self) -> list[Evidence]:
        """Return the evidence on each metric of a trial of shape ()."""
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
        """Return the state for JSON, as `restore` takes it."""
        return {name: array.tolist() for name, array in self._arrays().items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; raise ValueError if it does not fit these metrics."""
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
