"""Sessions: what sequences learn together, all those of an engine, and those whose requests name the same session.

Callers' threads begin sequences while the worker records the results of others, so what both touch has a lock.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .rest import Waits
from .trust import CAUTION, PRIOR, Trust

SHARED_MEMORY = 0.98  # what is left of a round's weight a round later, if all sequences record
Source = Literal["model", "lookup", "habit"]
# By source of drafts: the weight of what is believed at first, in trials, and its ratio. Texts are cheap to look up in.
PRIORS: dict[Source, tuple[float, float]] = {"model": (PRIOR, CAUTION), "lookup": (8.0, 1.0), "habit": (8.0, 1.0)}
PROBES = (16, 256)  # rounds until a draft that does not pay is tried again: at first, and at most
PRICE = 48  # rounds of rest for each round, past the first, that a probe has cost
MAX_SESSIONS = 1024  # the least recently used one is forgotten first
MAX_AGE = 3600.0  # seconds without a request, after which a session is forgotten


@dataclass(slots=True)
class Probing:
    """Schedules the next try of a draft that does not pay. Only the worker changes it."""

    rest: int = 0  # rounds left before the next try, counting only those that would try
    wait: int = PROBES[0]

    def due(self) -> bool:
        """Return whether it is time to try; counts a round that would."""
        self.rest -= 1
        return self.rest < 0

    def probed(self, accepted: int, rounds: float = 0.0) -> None:
        """Note a probe's result: after success the next round may try again, after failure none for longer than before.

        `rounds`: what the draft took to read the text for the probe, in rounds of plain decoding.
        """
        self.rest = 0 if accepted else self.wait + int(PRICE * max(rounds - 1.0, 0.0))
        self.wait = max(self.wait // 2, PROBES[0]) if accepted else min(2 * self.wait, PROBES[1])


class Shared:
    """The state that all sequences of an engine share: the trust in each source, and when the model is tried next."""

    def __init__(self) -> None:
        self.probing, self.waits, self._lock = Probing(), Waits(), threading.Lock()
        self._trusts = {each: Trust(r * weight, weight, SHARED_MEMORY, 0.0) for each, (weight, r) in PRIORS.items()}

    def record(self, source: Source, accepted: int, chances: Sequence[float]) -> None:
        """See `Trust.record`."""
        with self._lock:
            self._trusts[source].record(accepted, chances)

    def trust(self, source: Source) -> Trust:
        """Return a new trust in a source for one sequence or session to begin with."""
        with self._lock:
            return Trust(PRIORS[source][0] * min(self._trusts[source].ratio, 1.0), PRIORS[source][0])


@dataclass(slots=True)
class Session:
    """The trust that a session's drafts have earned. A request that names no session has a session for itself.

    Only the worker uses the trusts once the first request runs.
    """

    shared: Shared
    probing: Probing
    trusts: dict[Source, Trust] = field(init=False)

    def __post_init__(self) -> None:
        self.trusts = {source: self.shared.trust(source) for source in PRIORS}

    def record(self, source: Source, accepted: int, chances: Sequence[float]) -> None:
        """Record a round's trials of a source's draft, for the session and for all sequences; see `Trust.record`."""
        if chances:
            self.trusts[source].record(accepted, chances)
            self.shared.record(source, accepted, chances)


@dataclass(slots=True)
class _Entry:
    asked: float  # when a request last named it, by the clock
    sessions: dict[bool, Session] = field(default_factory=dict)  # by whether tokens are sampled


class Sessions:
    """The sessions that requests name, greedy and sampled ones apart; at most `MAX_SESSIONS`, none past `MAX_AGE`.

    A session that is forgotten while a request of it runs stays with that request; the next request begins it anew.
    `clock`: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._shared = {sampled: Shared() for sampled in (False, True)}
        self._entries, self._clock, self._lock = OrderedDict[str, _Entry](), clock, threading.Lock()

    def of(self, name: str | None, sampled: bool) -> Session:
        """Return the session of that name, now the most recently used; without a name, a new one that nobody shares."""
        shared = self._shared[sampled]
        if name is None:
            return Session(shared, shared.probing)
        with self._lock:
            now = self._clock()
            while self._entries and now - next(iter(self._entries.values())).asked >= MAX_AGE:
                self._entries.popitem(last=False)
            entry = self._entries.pop(name, None) or _Entry(now)
            entry.asked, self._entries[name] = now, entry
            if len(self._entries) > MAX_SESSIONS:
                self._entries.popitem(last=False)
            if sampled not in entry.sessions:
                entry.sessions[sampled] = Session(shared, Probing(shared.probing.rest, shared.probing.wait))
            return entry.sessions[sampled]
