"""Trust: how many drafted tokens came true for each that calibration expected to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PRIOR, CAUTION = 3.0, 0.9  # trials that what was known before weighs, and how far nothing known is believed
MEMORY = 0.95  # what is left of a round a round later
SURPRISE, LEFT = 0.005, 2.0  # failures in a row less likely than that: all is forgotten but doubt, of so many trials
DOUBTED = 0.1
SURE = 0.98  # no token is likelier


@dataclass(slots=True)
class Trust:
    """How many drafted tokens came true for each that was expected to by calibration; what was long ago counts less.

    A trial is a node of the accepted path that had children; it fails where none of them came true, and ends the path.
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

    def record(self, accepted: int, chances: Sequence[float]) -> None:
        """A round's trials: how many succeeded, and by calibration each one's chance."""
        if not chances:
            return
        self.doubt = 1.0 if accepted else self.doubt * (1 - min(chances[0] * self.ratio, SURE))
        self.accepted = self.memory * self.accepted + accepted
        self.expected = self.memory * self.expected + sum(chances)
        if self.doubt < self.surprise:
            self.accepted, self.expected, self.doubt = LEFT * DOUBTED, LEFT, 1.0
