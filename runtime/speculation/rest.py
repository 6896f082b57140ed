"""Rest: a sequence whose drafts bring less than deciding takes decodes plainly for a while, and decides nothing.

Deciding takes the host's time in every round, drafted or not. So a sequence keeps a balance of its decided rounds: the
seconds that drafts gained over plain decoding, by the corrected table, less those that deciding took, by the clock.
Once it is negative the sequence rests, each time for longer; it wakes early if habits foretell what it emits.
"""

from __future__ import annotations

from dataclasses import dataclass

WATCH = 8  # decided rounds before a sequence may rest; half as many while others rest for longest
KEPT = 1 - 1 / 32  # share of the balance that is left a round later
RESTS = (16, 128)  # rounds of rest: of an engine's first, and at most
DEAR = 0.02  # share of a plain token's seconds below which deciding is no reason to rest
FORETOLD = 2  # tokens in a row, after which a round is decided: if it drafts, the rest is over


@dataclass(slots=True)
class Waits:
    """How long the next rest of any sequence is, in rounds. Only the worker changes it."""

    rounds: int = RESTS[0]


@dataclass(slots=True)
class Rest:
    """One sequence's balance, and its rounds of rest that are `left`."""

    waits: Waits
    left: int = 0
    took: float = 0.0  # seconds that deciding the round took; 0: nobody measures it, and nobody rests
    _balance: float = 0.0
    _watched: int = 0
    _foretold: int = 0

    @property
    def rests(self) -> bool:
        """Return whether the next round is not decided."""
        return self.left > 0 and self._foretold < FORETOLD

    def decided(self, accepted: int, extra: float, plain: float) -> None:
        """Note a decided round; a rest begins if the balance is negative.

        Args:
            accepted: Tokens of its draft that came true.
            extra: Seconds that the draft added to the round; 0: it had none, or free rows alone, as at rest.
            plain: Seconds that plain decoding takes for a token of this sequence.
        """
        if self.took <= DEAR * plain or (self.left and not extra):
            self._foretold = 0
            return
        self.left, self._watched = 0, self._watched + 1
        self._balance = KEPT * self._balance + (accepted * plain - extra if extra else 0.0) - self.took
        if self._watched < (WATCH if self.waits.rounds < RESTS[1] else WATCH // 2):
            return
        if self._balance < 0:
            self.left, self.waits.rounds = self.waits.rounds, min(2 * self.waits.rounds, RESTS[1])
            self._balance, self._watched, self._foretold = 0.0, 0, 0
        elif self._watched % WATCH == 0:
            self.waits.rounds = max(self.waits.rounds // 2, RESTS[0])

    def passed(self, foretold: bool) -> None:
        """Note a round of a rest; `foretold`: whether habits had its token."""
        self._foretold = self._foretold + 1 if foretold else 0
        self.left -= 1
