"""Rest: a sequence whose drafts bring less than deciding takes decodes plainly for a while, and decides nothing.

Deciding takes the host's time in every round, drafted or not. So a sequence keeps a balance of its decided rounds: the
seconds that drafts gained over plain decoding, by the corrected table, less those that deciding took, by the clock.
Once it is negative the sequence rests, each time for longer. It wakes early if its last tokens could have been drafted.
"""

from __future__ import annotations

from dataclasses import dataclass

WATCH = 8  # decided rounds before a sequence may rest; half as many while others rest for longest
KEPT = 1 - 1 / 32  # share of the balance that is left a round later
RESTS = (16, 128)  # rounds of rest: of an engine's first, and at most
BESIDE = 1.7  # what deciding costs, over its own time: threads fall asleep meanwhile, and results are recorded
DEAREST = 0.5  # bound of what deciding costs, in rounds of plain decoding: an engine's first times are longer
DEAR = 0.02  # share of a plain token's seconds below which deciding is no reason to rest
FORETOLD = 4  # tokens in a row that habits have to foretell to wake a sequence
REPEATED = 8  # tokens that the text has to repeat for the same
PEEKS = (4, 8)  # rounds at rest before a look: a rest's first, and others; doubled by each wake in vain
FRESH = 8  # new sequences, of which one is watched at once while others rest for longest


@dataclass(slots=True)
class Waits:
    """How long the next rest of any sequence is, in `rounds`, and what deciding costs; only the worker changes them."""

    rounds: int = RESTS[0]
    took: float = 0.0  # seconds that the last decision of a round took, for all its sequences together
    cost: float = 0.0  # the same in rounds of plain decoding, with what it costs beside its own time
    begun: int = 0  # sequences; counted by callers' threads, so it may miss one

    def rest(self) -> Rest:
        """Return a new sequence's rest; while others rest for longest, most new ones begin with a rest."""
        self.begun += 1
        return Rest(self, self.rounds if self.rounds == RESTS[1] and self.begun % FRESH else 0)


@dataclass(slots=True)
class Rest:
    """One sequence's balance, and its rounds of rest that are `left`."""

    waits: Waits
    left: int = 0
    dozed: int = 0  # rounds at rest since the drafter last learnt from the text
    took: float = 0.0  # seconds that deciding the round took; 0: nobody measures it, and nobody rests
    _peek: int = PEEKS[0]
    _awake: bool = False  # whether the next round is decided though it rests
    _balance: float = 0.0
    _watched: int = 0

    @property
    def rests(self) -> bool:
        """Return whether the next round is not decided."""
        return self.left > 0 and not self._awake

    def decided(self, accepted: int, extra: float, plain: float, tokens: int = 1) -> None:
        """Note a decided round; a rest begins if the balance is negative, and is over if this round gained.

        Args:
            accepted: Tokens of its draft that came true.
            extra: Seconds that the draft added to the round.
            plain: Seconds of a round of plain decoding.
            tokens: Tokens of all sequences that such a round emits.
        """
        self.waits.cost = min(BESIDE * self.waits.took / plain, DEAREST)
        plain /= tokens
        gained = accepted * plain - extra - BESIDE * self.took
        took, woke, self.took, self._awake = self.took, self._awake, 0.0, False
        if self.left and gained < 0:  # it woke in vain, or decides in all rounds, as one alone with a free row does
            self._peek *= 1 + woke
            return
        self.left = 0
        if took <= DEAR * plain:
            return
        self._watched, self._balance = self._watched + 1, KEPT * self._balance + gained
        if self._watched < (WATCH if self.waits.rounds < RESTS[1] else WATCH // 2):
            return
        if self._balance < 0:
            self.left, self.waits.rounds = self.waits.rounds, min(2 * self.waits.rounds, RESTS[1])
            self._balance, self._watched, self._peek = 0.0, 0, PEEKS[0]
        elif self._watched % WATCH == 0:
            self.waits.rounds = max(self.waits.rounds // 2, RESTS[0])

    def dozes(self, spares: bool = False) -> bool:
        """Return whether the next round is not decided, at rest or because it `spares` somebody, and count it."""
        dozes = (rests := self.rests) or spares
        self.left, self.dozed = self.left - rests, self.dozed + dozes
        return dozes

    @property
    def due(self) -> bool:
        """Return whether it is time to look at what the sequence emitted at rest."""
        return self.dozed >= self._peek

    def looked(self, wakes: bool) -> None:
        """Note a look; `wakes`: whether the last tokens could have been drafted, so that the next round is decided."""
        self._awake, self.dozed, self._peek = wakes, 0, max(self._peek, PEEKS[1])
