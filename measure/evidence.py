"""Anytime-valid tests by betting: e-processes for the means of values in [0, 1] (Waudby-Smith and Ramdas, 2010.09686).

An e-process is the capital of a bettor against a null hypothesis. While the null is true, its expectation is at most
1, so the probability that it ever reaches 1/α is at most α (Ville's inequality), however often it is checked. Here the
capital is spread evenly over fixed bets of several sizes. All functions take arrays; bets are a new last axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Side = Literal["above", "below", "either"]
FRACTIONS = np.array([1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 7 / 8])  # stakes, of the largest bet that cannot go broke
ODDS = np.array([5 / 4, 3 / 2, 2, 3, 5, 10])  # alternatives bet on: a Bernoulli outcome's odds over those of the null


def log_factors(values: ArrayLike, mean: ArrayLike, side: Side = "above", fractions: Array = FRACTIONS) -> Array:
    """Return the logarithm of the factor by which each bet multiplies its capital: `[…]` to `[…, bets]`.

    Args:
        values: Observations in [0, 1]; NaN is no observation and changes nothing.
        mean: The mean under the null hypothesis.
        side: The null is that a value's mean, given all earlier values, is ≤ `mean` ("above"), ≥ `mean` ("below") or
            equal to it ("either": half of the bets on each side).
        fractions: What each bet stakes, `[…, bets]`.
    """
    x, m = np.asarray(values, np.float64), np.asarray(mean, np.float64)
    if side == "either":
        return np.concatenate([log_factors(x, m), log_factors(x, m, "below")], axis=-1)
    gain = x / m - 1 if side == "above" else (1 - x) / (1 - m) - 1
    return np.asarray(np.log1p(fractions * np.where(np.isnan(gain), 0.0, gain)[..., None]))


def bernoulli(rate: ArrayLike) -> Array:
    """Return `fractions` for 0/1 outcomes whose mean is at most `rate` under the null, `[…]` to `[…, bets]`.

    A bet's factor is then the likelihood ratio of higher `ODDS` to the null's. This detects small excesses over a rate
    near 0, where `FRACTIONS` would stake too much. For the side "below" pass 1 − rate.
    """
    rate = np.asarray(rate, np.float64)[..., None]
    return np.asarray(rate * (ODDS - 1) / (1 + rate * (ODDS - 1)))


def start(shape: tuple[int, ...] = ()) -> Array:
    """Return the logarithm of each bet's capital before the first value, `[*shape, bets]`."""
    return np.zeros((*shape, len(FRACTIONS)))


def log_e(capital: Array) -> Array:
    """Return the logarithm of the e-process, the mean of the bets' capital: log capital `[…, bets]` to `[…]`."""
    top = capital.max(axis=-1, keepdims=True)
    return np.asarray(top[..., 0] + np.log(np.exp(capital - top).mean(axis=-1)))


def e_process(values: ArrayLike, mean: ArrayLike, side: Side = "above") -> Array:
    """Return the logarithm of the e-process after each value along the first axis."""
    return log_e(np.cumsum(log_factors(values, mean, side), axis=0))


def restarted(capital: Array, factors: Array) -> Array:
    """Return the log capital of Shiryaev-Roberts detectors after one more value; it is `-inf` before the first.

    A unit of capital is added before each value, so a change is found whenever it happens. While the null is true,
    the mean number of values until the detector reaches c is at least c.
    """
    return np.asarray(np.logaddexp(capital, 0.0) + factors)


def detector(values: ArrayLike, mean: ArrayLike, side: Side = "above") -> Array:
    """Return the logarithm of the detector (see `restarted`) after each value along the first axis."""
    factors = log_factors(values, mean, side)
    total = np.cumsum(factors, axis=0)
    before = np.logaddexp.accumulate(factors - total, axis=0)  # −total before each value
    return log_e(total + before)


def contrast(candidate: ArrayLike, weight: ArrayLike, score: ArrayLike) -> Array:
    """Return a value in [0, 1] for each request, for tests of two arms; its mean is 1/2 if the arm makes no difference.

    The null hypothesis is that each request's score would have been the same in the other arm. Only the draw is random,
    so changing load, heavy tails and correlated requests do no harm. One-sided, the null is that no score is higher
    (lower) with the candidate than without.

    Args:
        candidate: Whether the request was drawn for the candidate.
        weight: The probability of that draw.
        score: The request's outcome in [−1, 1], on a scale fixed before the outcome was known.
    """
    a, w = np.asarray(candidate, np.float64), np.asarray(weight, np.float64)
    return np.asarray(((a - w) / np.maximum(w, 1 - w) * np.asarray(score, np.float64) + 1) / 2)


@dataclass(slots=True)
class Scale:
    """Running means and variances of series of values, which bound the next value without looking at it.

    All fields have one shape, with one series per element. `width`: the fixed width of values in [0, 1]; NaN for
    unbounded values, which are scaled by their standard deviation. The first `WARM` values of a series score 0.
    """

    count: Array
    mean: Array
    variance: Array
    width: Array
    WARM = 8
    MEMORY = 256  # values: the averages' update rate never falls below 1 / MEMORY

    @classmethod
    def of(cls, width: ArrayLike) -> Scale:
        """Return the scale before the first value."""
        shape = np.shape(width)
        return cls(np.zeros(shape), np.zeros(shape), np.zeros(shape), np.array(width, np.float64))

    def score(self, values: Array) -> Array:
        """Scale values to [−1, 1] by their distance from the mean, in widths or in two standard deviations.

        Larger distances are clipped; NaN stays NaN.
        """
        spread = np.where(np.isnan(self.width), 2 * np.sqrt(self.variance), self.width)
        score = np.clip((values - self.mean) / np.where(spread > 0, spread, np.inf), -1, 1)
        return np.asarray(np.where((self.count < self.WARM) & ~np.isnan(values), 0.0, score))

    def add(self, values: Array) -> None:
        """Update the averages with values; outliers of unbounded series count as three standard deviations away."""
        seen = ~np.isnan(values)
        self.count = self.count + seen
        rate = np.where(seen, np.maximum(1 / np.maximum(self.count, 1), 1 / self.MEMORY), 0.0)
        off = np.where(seen, values - self.mean, 0.0)
        bound = np.where(self.count > self.WARM, 3 * np.sqrt(self.variance) + 1e-9, np.inf)
        off = np.where(np.isnan(self.width), np.clip(off, -bound, bound), off)
        self.mean = self.mean + rate * off
        self.variance = (1 - rate) * (self.variance + rate * off**2)
