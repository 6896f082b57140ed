"""A trial of a candidate against a baseline: for each metric an e-process, the capital of bets on harm.

The null hypothesis is that no request's value would be better in the other arm. Only the draw of the arm is random, so
changing load, heavy tails and correlated requests do no harm. By Ville's inequality the probability that the mean of
the e-processes ever reaches 1/α is at most α, however often it is checked (Waudby-Smith and Ramdas, arXiv 2010.09686).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

STAKES = np.array([1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 7 / 8])  # shares of the capital that the bets risk
_WARM, _MEMORY = 8, 256  # values before the first bet, and values that a running mean remembers
_MAX_LOG = 700.0  # maximum logarithm of a reported e-value, so that JSON can represent it


@dataclass(frozen=True, slots=True)
class Metric:
    """A value of each request: a share in [0, 1], else a positive number that is compared by its logarithm."""

    name: str
    worse: Literal["higher", "lower"] = "higher"
    share: bool = False


@dataclass(frozen=True, slots=True)
class Evidence:
    """A metric's e-value against "no worse", and its numbers of values and means as (baseline, candidate).

    Means are geometric unless the metric is a share; None without values.
    """

    metric: str
    harm: float
    n: tuple[int, int]
    means: tuple[float | None, float | None]


class _Bets:
    """The bets on one metric."""

    def __init__(self, metric: Metric, weight: float) -> None:
        self.metric, self._weight = metric, weight
        self._capital = np.zeros(len(STAKES))  # logarithms
        self._count, self._mean, self._variance = 0, 0.0, 0.0
        self._n, self._sums = [0, 0], [0.0, 0.0]

    def add(self, candidate: bool, value: float) -> None:
        """Bet on a request's value: its scale is fixed before the value is known."""
        if not self.metric.share:
            if value <= 0:
                return
            value = math.log(value)
        sign = 1 if self.metric.worse == "higher" else -1
        drawn = (candidate - self._weight) / max(self._weight, 1 - self._weight)
        self._capital += np.log1p(STAKES * sign * drawn * self._score(value))
        self._n[candidate] += 1
        self._sums[candidate] += value
        self._count += 1
        rate, away = max(1 / self._count, 1 / _MEMORY), value - self._mean
        self._mean += rate * away
        self._variance = (1 - rate) * (self._variance + rate * away * away)

    def _score(self, value: float) -> float:
        """Return a value's distance from the mean in [−1, 1]: of 1, or of two standard deviations."""
        spread = 1.0 if self.metric.share else 2 * math.sqrt(self._variance)
        if self._count < _WARM or not spread:
            return 0.0
        return max(-1.0, min((value - self._mean) / spread, 1.0))

    @property
    def log_harm(self) -> float:
        """The logarithm of the e-process, the mean of the bets' capital."""
        return _log_mean(self._capital)

    def evidence(self) -> Evidence:
        """Return the evidence."""
        means = [total / n if n else None for total, n in zip(self._sums, self._n, strict=True)]
        if not self.metric.share:
            means = [None if mean is None else math.exp(mean) for mean in means]
        return Evidence(self.metric.name, _number(self.log_harm), (self._n[0], self._n[1]), (means[0], means[1]))


class Trial:
    """Weighs metrics, request by request."""

    def __init__(self, metrics: Sequence[Metric], weight: float, alpha: float) -> None:
        """`weight`: the probability that a request is drawn for the candidate."""
        self._bets, self._alpha = [_Bets(metric, weight) for metric in metrics], alpha

    def add(self, candidate: bool, values: Mapping[str, float]) -> None:
        """Add a request that has ended; a metric that it lacks is no evidence."""
        for bets in self._bets:
            if (value := values.get(bets.metric.name)) is not None:
                bets.add(candidate, value)

    @property
    def e(self) -> float:
        """The e-value against "the candidate is no worse", the mean of all metrics'."""
        return _number(_log_mean(np.array([bets.log_harm for bets in self._bets])))

    @property
    def harmful(self) -> bool:
        """Return whether the candidate is proven to be worse."""
        return self.e >= 1 / self._alpha

    def evidence(self) -> list[Evidence]:
        """Return the evidence on each metric."""
        return [bets.evidence() for bets in self._bets]

    def view(self) -> dict[str, Any]:
        """Return the trial for JSON."""
        return {"e": self.e, "alpha": self._alpha, "evidence": [asdict(each) for each in self.evidence()]}


def _log_mean(logs: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    return float(np.logaddexp.reduce(logs) - np.log(len(logs)))


def _number(log: float) -> float:
    return math.exp(min(log, _MAX_LOG))
