"""Trust: the number of drafted tokens that came true, over the number that calibration expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PRIOR, CAUTION = 3.0, 0.9  # weight of the prior in trials, and its ratio if nothing is known
MEMORY = 0.95  # what is left of a round's weight a round later
SURPRISE, LEFT = 0.005, 2.0  # failures in a row less likely than SURPRISE leave only doubt, of weight LEFT
DOUBTED = 0.1  # the ratio of that doubt
SURE = 0.98  # maximum chance of a token


@dataclass(slots=True)
class Trust:
    """Drafted tokens that came true, over those that calibration expected; old rounds count less.

    A trial is a node of the accepted path that had children; it fails if none of them came true, and ends the path.
    """

    accepted: float = PRIOR * CAUTION
    expected: float = PRIOR
    memory: float = MEMORY
    surprise: float = SURPRISE
    doubt: float = 1.0  # how likely the failures since the last success were, by the estimate

    @property
    def ratio(self) -> float:
        """The estimate: the mean of a gamma distribution."""
        return self.accepted / self.expected

    @property
    def log_ratio(self) -> float:
        """The estimate's logarithm, of a thousandth at least."""
        return math.log(max(self.ratio, 1e-3))

    def record(self, accepted: int, chances: Sequence[float]) -> None:
        """Record a round's trials: how many succeeded, and the calibrated chance of each."""
        if not chances:
            return
        self.doubt = 1.0 if accepted else self.doubt * (1 - min(chances[0] * self.ratio, SURE))
        self.accepted = self.memory * self.accepted + accepted
        self.expected = self.memory * self.expected + sum(chances)
        if self.doubt < self.surprise:
            self.accepted, self.expected, self.doubt = LEFT * DOUBTED, LEFT, 1.0
