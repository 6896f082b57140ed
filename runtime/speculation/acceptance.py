"""How a drafter's tokens fare: those that were accepted, over those that calibration expected."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .timing_table import MAX_CHANCE

PRIOR = 4.0  # tokens that the prior weighs
MAX_RATIO = 4.0  # bound of a ratio to the calibration; of a step to its table, 1/4 too
MEMORY = 0.9  # weight that what was recorded keeps beside what comes next


@dataclass(slots=True)
class Acceptance:
    """A drafter's accepted and expected tokens; old rounds count less.

    A trial is a node of the accepted path that had children; it fails if none of them was accepted, and ends the path.
    """

    accepted: float = PRIOR
    expected: float = PRIOR

    @property
    def ratio(self) -> float:
        """Accepted tokens for each expected one, at most MAX_RATIO."""
        return min(self.accepted / self.expected, MAX_RATIO)

    def record(self, accepted: int, chances: Sequence[float]) -> None:
        """Record a round's trials: how many succeeded, and the calibrated chance of each."""
        if (expected := sum(chances)) > 1e-3:  # else both counts would decay to nothing
            self.accepted = MEMORY * self.accepted + accepted
            self.expected = MEMORY * self.expected + expected

    def prior(self) -> Acceptance:
        """Return what another sequence begins with."""
        return Acceptance(PRIOR * self.ratio, PRIOR)

    def path(self, chances: Sequence[float]) -> list[float]:
        """Return the chance that each token of a chain is accepted with all before it, by its calibrated chance."""
        return [*accumulate((min(chance * self.ratio, MAX_CHANCE) for chance in chances), operator.mul)]
