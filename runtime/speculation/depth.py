"""How many tokens of texts' continuations a device drafts by itself: as many as rounds have shown to pay.

A drafted token costs no row there, but it is looked at, and the host handles what comes true. So what rounds take is
kept for a few bounds, by how many sequences share them, and the bound that brings most tokens a second is taken; others
are tried now and then, in a few rounds, if they could be better. No token depends on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

BOUNDS = (24, 4, 0)  # tokens that are drafted at most, in the order in which they are tried
FIRST, FURTHER = 0.4, 0.6  # chances of the first token and of each after it, before any was seen
KEPT = 1 - 1 / 64  # weight of what was seen, a sequence's round later
TIMED, LEAST = 15, 5  # rounds of a bound whose median counts, and from how many on it does
BRIEF = 8  # rounds in which a bound is tried
AGAIN = (8, 64)  # launches after which others are tried again: at first, and at most
HOPE = 3.0  # how many times as many tokens a second another bound might bring as is known, or its rounds be cheaper


@dataclass(slots=True)
class Depths:
    """Chooses the bound of rounds by what earlier ones brought and took. Only the worker uses it."""

    _reached: NDArray[np.float64] = field(
        default_factory=lambda: np.array([FIRST * FURTHER**n for n in range(BOUNDS[0])])
    )
    _seconds: dict[tuple[int, int], deque[float]] = field(default_factory=dict)  # by sequences and bound
    _left: int = AGAIN[0]  # launches until others are tried again
    _wait: int = AGAIN[0]
    _tried: int = 0

    def choose(self, sequences: int, most: int) -> tuple[int, int | None]:
        """Return the bound of the next rounds, at most `most`, and how many rounds are to try it; None: any number."""
        if not most:
            return 0, None
        bounds = list(dict.fromkeys(min(bound, most) for bound in BOUNDS))
        known, best = self._best(sequences, bounds)
        if best is None:
            return bounds[0], None
        least = self.rate(sequences, best)
        cheap = 1.0 / median(self._seconds[sequences, best]) * HOPE
        for bound in bounds:
            if bound not in known and (1.0 + self.brought(bound)) * cheap > least:
                return bound, BRIEF
        self._left -= 1
        hopeful = [bound for bound in known if bound != best and self.rate(sequences, bound) * HOPE > least]
        if self._left > 0 or not hopeful:
            return best, None
        self._wait, self._tried = min(2 * self._wait, AGAIN[1]), self._tried + 1
        self._left = self._wait
        return hopeful[self._tried % len(hopeful)], BRIEF

    def _best(self, sequences: int, bounds: Sequence[int]) -> tuple[list[int], int | None]:
        """Return the bounds whose rounds were timed, and the one of them that brings most tokens a second, if any."""
        known = [bound for bound in bounds if len(self._seconds.get((sequences, bound), ())) >= LEAST]
        return known, max(known, key=lambda bound: self.rate(sequences, bound), default=None)

    def best(self, sequences: int, most: int) -> float:
        """Return how many drafted tokens come true in a sequence's round with the best known bound, on average."""
        _, best = self._best(sequences, [min(bound, most) for bound in BOUNDS])
        return 0.0 if best is None else self.brought(best)

    def brought(self, bound: int) -> float:
        """Return how many drafted tokens come true in a sequence's round with a bound, on average."""
        return float(self._reached[:bound].sum())

    def rate(self, sequences: int, bound: int) -> float:
        """Return a sequence's tokens a second with a bound whose rounds were timed."""
        return (1.0 + self.brought(bound)) / median(self._seconds[sequences, bound])

    def record(self, bound: int, accepted: Sequence[int], seconds: float | None, sequences: int) -> None:
        """Record a round.

        Args:
            bound: The round's bound.
            accepted: By sequence whose text is continued, how many drafted tokens came true.
            seconds: Seconds since the round before; None: it followed none.
            sequences: How many sequences shared the round.
        """
        if bound and accepted:
            came = (np.array(accepted)[:, None] > np.arange(bound)).mean(axis=0)
            kept = KEPT ** len(accepted)
            self._reached[:bound] = kept * self._reached[:bound] + (1 - kept) * came
        if seconds is not None and seconds > 1e-9:  # otherwise the clock is wrong
            self._seconds.setdefault((sequences, bound), deque(maxlen=TIMED)).append(seconds)
