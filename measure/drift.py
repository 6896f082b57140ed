"""Drift: has a signal of requests moved away from a reference window?

A value is turned into its rank among the reference's, so that any signal is bounded, whatever its unit and tails. Four
detectors watch each signal: higher, lower, wider and narrower than the reference by more than `MARGIN`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from .evidence import Array, log_e, log_factors, restarted, start

Direction = Literal["higher", "lower", "wider", "narrower"]
_DIRECTIONS: tuple[Direction, ...] = ("higher", "lower", "wider", "narrower")
MARGIN = (
    0.04  # of the mean rank, 0 to 1: a seventh of a standard deviation, and four times what 1,000 values leave open
)
PATIENCE = 1e8  # values until a false alarm of a signal, in the mean, or more
WINDOW = 500  # values that the population stability index is of
_BINS = 10


class Reference:
    """The values that a signal is held against."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = np.sort(np.asarray(values, np.float64))
        self.mean = float(self.values.mean())
        self._spread = float(np.abs(2 * self.ranks(self.values) - 1).mean())
        self._edges = np.unique(np.quantile(self.values, np.linspace(0, 1, _BINS + 1)[1:-1]))
        self._shares = self._binned(self.values)

    def ranks(self, values: ArrayLike) -> Array:
        """The part of the reference below each value, equal ones counting half."""
        left, right = (np.searchsorted(self.values, values, side) for side in ("left", "right"))
        return np.asarray((left + right) / (2 * len(self.values)))

    def log_factors(self, values: ArrayLike) -> Array:
        """What values multiply the detectors' bets by: `[…]` to `[…, 4, bets]`, by direction."""
        ranks = self.ranks(values)
        spreads = np.abs(2 * ranks - 1)
        sides = []
        for each, mean in ((ranks, 0.5), (spreads, self._spread)):
            above, below = mean + MARGIN, mean - MARGIN  # which no mean is outside (0, 1): nothing is staked on it
            sides.append(log_factors(each if above < 1 else np.full_like(each, np.nan), above))
            sides.append(log_factors(each if below > 0 else np.full_like(each, np.nan), below, "below"))
        return np.stack(sides, axis=-2)

    def stability(self, values: Sequence[float]) -> float:
        """The population stability index of values: 0 where they lie as the reference does, and above 0.25 far off."""
        if not values:
            return 0.0
        found = self._binned(np.asarray(values, np.float64))
        return float(((found - self._shares) * np.log(found / self._shares)).sum())

    def _binned(self, values: Array) -> Array:
        """The share of values in each bin, half a value more in each, so that none is empty."""
        bins = np.searchsorted(self._edges, values, "left")
        counts = np.bincount(bins, minlength=len(self._edges) + 1) + 0.5
        return np.asarray(counts / counts.sum())


@dataclass(frozen=True, slots=True)
class Alarm:
    """A signal has moved: which way, and its means before and lately."""

    direction: Direction
    reference: float
    recent: float
    psi: float


class Signal:
    """Watches one signal. After an alarm it begins again: one that stays away alarms again and again."""

    def __init__(self, reference: Reference) -> None:
        self.reference, self.recent = reference, deque[float](maxlen=WINDOW)
        self._capital = self._nothing()

    def add(self, value: float) -> Alarm | None:
        """Take one more value."""
        self.recent.append(value)
        self._capital = restarted(self._capital, self.reference.log_factors(value))
        if log_e(self._capital.reshape(-1)) < np.log(PATIENCE):
            return None
        direction = _DIRECTIONS[int((log_e(self._capital) >= np.log(PATIENCE) / 2).argmax())]
        self._capital = self._nothing()
        return Alarm(direction, self.reference.mean, float(np.mean(self.recent)), self.psi)

    @property
    def psi(self) -> float:
        """The population stability index of the last `WINDOW` values."""
        return self.reference.stability(list(self.recent))

    @staticmethod
    def _nothing() -> Array:
        return start((len(_DIRECTIONS),)) - np.inf
