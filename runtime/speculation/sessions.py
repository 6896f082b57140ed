"""What sequences learn together: all those of an engine, and those whose requests name the same session.

Callers' threads begin sequences while the worker records what came of others, so whatever both touch has a lock.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .trust import PRIOR, Trust

SHARED_MEMORY = 0.98  # what is left of a round a round later, where all sequences record
LOOKUP_PRIOR = 8.0
PROBES = (16, 256)  # rounds until a draft that does not pay is tried again: the first time, and at most
PRICE = 48  # rounds of rest for each round, past the first, that a probe has cost
MAX_SESSIONS = 1024  # the one that was asked for longest ago is forgotten first
MAX_AGE = 3600.0  # seconds without a request, after which a session is forgotten


@dataclass(slots=True)
class Probing:
    """When a draft that does not pay is tried next. The worker alone changes it."""

    rest: int = 0  # rounds, of all those that would try
    wait: int = PROBES[0]

    def due(self) -> bool:
        """Whether it is time; counts a round that would try."""
        self.rest -= 1
        return self.rest < 0

    def probed(self, accepted: int, rounds: float = 0.0) -> None:
        """What came of it: the next round may try again, or none for longer than the last time.

        rounds: of plain decoding, that the draft took to read the text for it.
        """
        self.rest = 0 if accepted else self.wait + int(PRICE * max(rounds - 1.0, 0.0))
        self.wait = max(self.wait // 2, PROBES[0]) if accepted else min(2 * self.wait, PROBES[1])


class Shared:
    """What all sequences of an engine share: what came true of the model's drafts, and when it is tried next."""

    def __init__(self) -> None:
        self.probing = Probing()
        self._model, self._lock = Trust(memory=SHARED_MEMORY, surprise=0.0), threading.Lock()

    def record(self, accepted: int, chances: Sequence[float]) -> None:
        """See `Trust.record`."""
        with self._lock:
            self._model.record(accepted, chances)

    def trust(self) -> Trust:
        """The trust in the model that a sequence or a session begins with, for it alone."""
        with self._lock:
            return Trust(PRIOR * min(self._model.ratio, 1.0))


@dataclass(slots=True)
class Session:
    """What the requests of one session know of their drafts. A request that names no session has one for itself.

    The trusts are the worker's alone once the first request runs.
    """

    shared: Shared
    probing: Probing
    model: Trust = field(init=False)
    lookup: Trust = field(default_factory=lambda: Trust(LOOKUP_PRIOR, LOOKUP_PRIOR))  # it costs little to be believed
    habit: Trust = field(default_factory=lambda: Trust(LOOKUP_PRIOR, LOOKUP_PRIOR))

    def __post_init__(self) -> None:
        self.model = self.shared.trust()

    def record(self, accepted: int, chances: Sequence[float]) -> None:
        """What came of a tree of the model, for the session and for all sequences; see `Trust.record`."""
        self.model.record(accepted, chances)
        self.shared.record(accepted, chances)


@dataclass(slots=True)
class _Entry:
    asked: float  # when a request last named it, on the clock
    sessions: dict[bool, Session] = field(default_factory=dict)  # by whether tokens are sampled


class Sessions:
    """The sessions that requests name, greedy and sampled ones apart; at most `MAX_SESSIONS`, none past `MAX_AGE`.

    A session that is forgotten while a request of it runs stays that request's; the next one begins it anew.
    `clock`: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._shared = {sampled: Shared() for sampled in (False, True)}
        self._entries, self._clock, self._lock = OrderedDict[str, _Entry](), clock, threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, name: str | None, sampled: bool) -> Session:
        """The session of that name, from now on the one asked for last; without a name one of nobody else."""
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
                probing = Probing(shared.probing.rest, shared.probing.wait)
                entry.sessions[sampled] = Session(shared, probing)
            return entry.sessions[sampled]
