"""Sessions: what sequences learn of their drafters together, those of an engine and those that name one session.

Callers' threads begin sequences while the worker records the results of others, so what both touch has a lock.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from .acceptance import Acceptance

TextDrafter = Literal["lookup", "prediction"]  # the text's own past, and what the client expects
Drafter = Literal[TextDrafter, "model", "levels"]  # the model by its tokens' likelihoods, and by levels of its trees
PROBES = 16, 256  # rounds until a model that does not pay is tried again: at first, and at most
MAX_SESSIONS = 1024  # the least recently used one is forgotten first
MAX_AGE = 3600.0  # seconds without a request, after which a session is forgotten


@dataclass(slots=True)
class Backoff:
    """When a draft model that does not pay is tried again: twice as late after each failure."""

    rounds: int = PROBES[0]
    countdown: int = PROBES[0]

    def tick(self) -> bool:
        """Count a round without the model; return whether to try it, until a try is recorded or skipped."""
        self.countdown -= 1
        return self.countdown <= 0

    def skip(self) -> None:
        """Leave out a try, which would not pay even if it came true."""
        self.countdown = self.rounds

    def record(self, accepted: int) -> None:
        """Record a try: after a success the next round may try again."""
        self.countdown = 0 if accepted else self.rounds
        self.rounds = max(self.rounds // 2, PROBES[0]) if accepted else min(2 * self.rounds, PROBES[1])


class Session:
    """How drafters have fared in a session, or in all of an engine's together, which is the others' prior.

    A request that names no session has one for itself, whose backoff is the engine's.
    """

    def __init__(self, prior: Session | None = None, backoff: Backoff | None = None) -> None:
        self.backoff, self.prior, self._lock = backoff or Backoff(), prior, threading.Lock()
        self.drafters: dict[Drafter, Acceptance] = {drafter: Acceptance() for drafter in get_args(Drafter)}
        if prior:
            with prior._lock:
                self.drafters = {drafter: each.prior() for drafter, each in prior.drafters.items()}

    def record(self, drafter: Drafter, accepted: int, chances: Sequence[float]) -> None:
        """Record a round's trials, for the session and its prior; see `Acceptance.record`."""
        with self._lock:
            self.drafters[drafter].record(accepted, chances)
        if self.prior:
            self.prior.record(drafter, accepted, chances)


class Sessions:
    """The sessions that requests name, greedy and sampled ones apart; at most `MAX_SESSIONS`, none past `MAX_AGE`.

    A session that is forgotten while a request of it runs stays with that request; the next request begins it anew.
    `clock`: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = {sampled: Session() for sampled in (False, True)}
        # By name and whether tokens are sampled, each with the time of its last request, the oldest first.
        self._named = OrderedDict[tuple[str, bool], tuple[float, Session]]()
        self._clock, self._lock = clock, threading.Lock()

    def of(self, name: str | None, sampled: bool) -> Session:
        """Return the session of that name, now the most recently used; without a name, a new one that nobody shares."""
        engine = self._engine[sampled]
        if name is None:
            return Session(engine, engine.backoff)
        with self._lock:
            now = self._clock()
            while self._named and now - next(iter(self._named.values()))[0] >= MAX_AGE:
                self._named.popitem(last=False)
            _, session = self._named.pop((name, sampled), (now, Session(engine)))
            self._named[name, sampled] = now, session
            if len(self._named) > MAX_SESSIONS:
                self._named.popitem(last=False)
            return session
