"""Drift detection: has a signal measured on requests moved away from a reference window?

Each value is replaced by its rank among the reference's values, so every signal is bounded, whatever its unit and
tails. Four detectors watch each signal: higher, lower, wider and narrower than the reference by more than `MARGIN`.
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
# Tolerated shift of the mean rank (0 to 1): a seventh of the ranks' standard deviation, and four times the standard
# error of a reference of 1,000 values.
MARGIN = 0.04
PATIENCE = 1e8  # minimum mean number of values until a false alarm of a signal
WINDOW = 500  # values over which the population stability index is computed
_BINS = 10


class Reference:
    """The reference values that a signal is compared with."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = np.sort(np.asarray(values, np.float64))
        self.mean = float(self.values.mean())
        self._spread = float(np.abs(2 * self.ranks(self.values) - 1).mean())
        self._edges = np.unique(np.quantile(self.values, np.linspace(0, 1, _BINS + 1)[1:-1]))
        self._shares = self._binned(self.values)

    def ranks(self, values: ArrayLike) -> Array:
        """Return each value's rank in [0, 1]: the share of the reference below it, equal values counting half."""
        left, right = (np.searchsorted(self.values, values, side) for side in ("left", "right"))
        return np.asarray((left + right) / (2 * len(self.values)))

    def log_factors(self, values: ArrayLike) -> Array:
        """Return the logarithms of what values multiply each detector's bets by: `[…]` to `[…, 4, bets]`.

        The four detectors are in the order of `_DIRECTIONS`.
        """
        ranks = self.ranks(values)
        spreads = np.abs(2 * ranks - 1)
        sides = []
        for each, mean in ((ranks, 0.5), (spreads, self._spread)):
            above, below = mean + MARGIN, mean - MARGIN  # outside (0, 1) no mean can exceed it: NaN stakes nothing
            sides.append(log_factors(each if above < 1 else np.full_like(each, np.nan), above))
            sides.append(log_factors(each if below > 0 else np.full_like(each, np.nan), below, "below"))
        return np.stack(sides, axis=-2)

    def stability(self, values: Sequence[float]) -> float:
        """Return the population stability index of values: 0 if distributed like the reference, above 0.25 far off."""
        if not values:
            return 0.0
        found = self._binned(np.asarray(values, np.float64))
        return float(((found - self._shares) * np.log(found / self._shares)).sum())

    def _binned(self, values: Array) -> Array:
        """Return the share of values in each bin, with half a value added to each so that none is empty."""
        bins = np.searchsorted(self._edges, values, "left")
        counts = np.bincount(bins, minlength=len(self._edges) + 1) + 0.5
        return np.asarray(counts / counts.sum())


@dataclass(frozen=True, slots=True)
class Alarm:
    """A signal has moved: the direction, the reference's mean, the recent mean and the population stability index."""

    direction: Direction
    reference: float
    recent: float
    psi: float


class Signal:
    """A monitor of one signal. After an alarm it restarts, so a signal that stays away raises further alarms."""

    def __init__(self, reference: Reference) -> None:
        self.reference, self.recent = reference, deque[float](maxlen=WINDOW)
        self._capital = self._nothing()

    def add(self, value: float) -> Alarm | None:
        """Add a value; return an alarm if it shows that the signal has moved, else None."""
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
