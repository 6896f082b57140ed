"""Anytime-valid tests by betting: e-processes for the means of values in [0, 1] (Waudby-Smith and Ramdas, 2010.09686).

An e-process is capital that bets against a null hypothesis. While the null is true its expectation stays at most 1,
so it ever reaches 1/α with a probability of at most α (Ville), however often it is looked at. Here the capital is
spread evenly over fixed bets of several sizes. All functions take arrays; the bets are the last axis of what they add.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Side = Literal["above", "below", "either"]
FRACTIONS = np.array([1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 7 / 8])  # staked of the largest bet that cannot ruin
ODDS = np.array([5 / 4, 3 / 2, 2, 3, 5, 10])  # of a Bernoulli outcome, over those of the null, that are bet on


def log_factors(values: ArrayLike, mean: ArrayLike, side: Side = "above", fractions: Array = FRACTIONS) -> Array:
    """What each bet multiplies its capital by, as logarithms: `[…]` to `[…, bets]`.

    Above: the null is that the mean of a value, given all before, is ≤ `mean`. Below: that it is ≥. Either: that it is
    equal, half of the bets on each side. NaN is no observation, and changes nothing. fractions: what is staked,
    `[…, bets]`.
    """
    x, m = np.asarray(values, np.float64), np.asarray(mean, np.float64)
    if side == "either":
        return np.concatenate([log_factors(x, m), log_factors(x, m, "below")], axis=-1)
    gain = x / m - 1 if side == "above" else (1 - x) / (1 - m) - 1
    return np.asarray(np.log1p(fractions * np.where(np.isnan(gain), 0.0, gain)[..., None]))


def bernoulli(rate: ArrayLike) -> Array:
    """Fractions for outcomes of 0 and 1 whose mean is at most `rate` by the null, `[…]` to `[…, bets]`.

    What a bet then multiplies its capital by is the ratio of likelihoods between higher `ODDS` and those of the null.
    So a rate near 0 that is exceeded by a little is found too, where `FRACTIONS` stake too much. For "below" give
    1 − rate.
    """
    rate = np.asarray(rate, np.float64)[..., None]
    return np.asarray(rate * (ODDS - 1) / (1 + rate * (ODDS - 1)))


def start(shape: tuple[int, ...] = ()) -> Array:
    """The capital of each bet before the first value, as logarithms."""
    return np.zeros((*shape, len(FRACTIONS)))


def log_e(capital: Array) -> Array:
    """The e-process of bets' capital, `[…, bets]` to `[…]`, as a logarithm: their mean."""
    top = capital.max(axis=-1, keepdims=True)
    return np.asarray(top[..., 0] + np.log(np.exp(capital - top).mean(axis=-1)))


def e_process(values: ArrayLike, mean: ArrayLike, side: Side = "above") -> Array:
    """The logarithm of the e-process after each value along the first axis."""
    return log_e(np.cumsum(log_factors(values, mean, side), axis=0))


def restarted(capital: Array, factors: Array) -> Array:
    """The capital of Shiryaev-Roberts detectors after one more value, where `-inf` is the beginning.

    A unit of capital is added before each value, so that a change is found whenever it comes. While the null is true
    the mean number of values until the detector reaches c is at least c.
    """
    return np.asarray(np.logaddexp(capital, 0.0) + factors)


def detector(values: ArrayLike, mean: ArrayLike, side: Side = "above") -> Array:
    """The logarithm of the detector (see `restarted`) after each value along the first axis."""
    factors = log_factors(values, mean, side)
    total = np.cumsum(factors, axis=0)
    before = np.logaddexp.accumulate(factors - total, axis=0)  # −total before each value
    return log_e(total + before)


def contrast(candidate: ArrayLike, weight: ArrayLike, score: ArrayLike) -> Array:
    """A request's value in [0, 1] whose mean is 1/2 where its arm changes nothing: for tests of two arms.

    candidate: whether the request was drawn for the candidate. weight: the probability of that. score: in [−1, 1], what
    came of it, by a scale that was fixed before. The null hypothesis is that each request's score would have been the
    same in the other arm: the draw alone is random, so load that rises and falls, heavy tails and requests that are
    alike do no harm. One-sided, it is that no score is higher (lower) with the candidate than without.
    """
    a, w = np.asarray(candidate, np.float64), np.asarray(weight, np.float64)
    return np.asarray(((a - w) / np.maximum(w, 1 - w) * np.asarray(score, np.float64) + 1) / 2)


@dataclass(slots=True)
class Scale:
    """Where values lie lately, so that the next one can be bounded without a look at it.

    Arrays of one shape, a series of values to each place. `width`: the fixed width of values in [0, 1]; NaN for values
    without a bound, whose standard deviation is followed. The first `WARM` values of a series have score 0.
    """

    count: Array
    mean: Array
    variance: Array
    width: Array
    WARM = 8
    MEMORY = 256  # values

    @classmethod
    def of(cls, width: ArrayLike) -> Scale:
        """Before the first value."""
        shape = np.shape(width)
        return cls(np.zeros(shape), np.zeros(shape), np.zeros(shape), np.array(width, np.float64))

    def score(self, values: Array) -> Array:
        """Values as −1 to 1, clipped two standard deviations from the mean; NaN stays NaN."""
        spread = np.where(np.isnan(self.width), 2 * np.sqrt(self.variance), self.width)
        score = np.clip((values - self.mean) / np.where(spread > 0, spread, np.inf), -1, 1)
        return np.asarray(np.where((self.count < self.WARM) & ~np.isnan(values), 0.0, score))

    def add(self, values: Array) -> None:
        """Follow values; one far away moves the mean no further than one three deviations off."""
        seen = ~np.isnan(values)
        self.count = self.count + seen
        rate = np.where(seen, np.maximum(1 / np.maximum(self.count, 1), 1 / self.MEMORY), 0.0)
        off = np.where(seen, values - self.mean, 0.0)
        bound = np.where(self.count > self.WARM, 3 * np.sqrt(self.variance) + 1e-9, np.inf)
        off = np.where(np.isnan(self.width), np.clip(off, -bound, bound), off)
        self.mean = self.mean + rate * off
        self.variance = (1 - rate) * (self.variance + rate * off**2)
