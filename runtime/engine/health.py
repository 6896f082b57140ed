"""How an engine is: how much is in it, and whether its worker makes rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

State = Literal["idle", "running", "exclusive", "draining", "closed", "failed"]
Wait = Literal["request", "round", "exclusive section"]


@dataclass(frozen=True, slots=True)
class Usage:
    """How much is in an engine now, counted at one moment.

    `waiting`: requests without a slot; those whose callers stand in line for the queue are among them, and those that a
    `generate` or `stream` under way has yet to submit are not: these are `to_come`. `cache_tokens`: tokens that the
    target's cache has of the texts that run. `reusable_tokens`: those kept in free slots for prompts that begin the
    same. `cache_capacity_tokens`: what all slots hold together; of paged caches all pages, whose tokens count for each
    text that shares them. `dropped_results`: those that `on_finish` was never given.
    """

    waiting: int
    to_come: int
    running: int
    slots: int
    max_waiting: int
    cache_tokens: int
    reusable_tokens: int
    cache_capacity_tokens: int
    dropped_results: int


@dataclass(frozen=True, slots=True)
class Health:
    """What an engine's worker does.

    `state`: "idle" (there is nothing to do), "running", "exclusive" (a caller has the models for itself, as `logits`
    does), "draining", "closed" (or about to be), "failed" (the worker ended by a bug of ours, and `error` says which).
    `rounds`: those that have ended. `seconds_since_round`: since the last round ended, or since the first of what runs
    got its slot if that was later; None where nothing runs. Where it is much longer than any round takes, the worker is
    stuck. `waiting_for`: what the worker waits for, None where for nothing.
    """

    state: State
    rounds: int
    seconds_since_round: float | None
    waiting_for: Wait | None
    error: str | None = None


class Pulse:
    """The worker's rounds as they come and go; read from any thread, without a lock. `clock`: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.rounds, self.in_round = 0, False
        self._clock, self._since = clock, clock()

    def begin(self) -> None:
        """Something runs again, after nothing did."""
        self._since = self._clock()

    @contextmanager
    def round(self) -> Iterator[None]:
        """A round, however it ends."""
        self.in_round = True
        try:
            yield
        finally:
            self.in_round, self.rounds = False, self.rounds + 1
            self._since = self._clock()

    @property
    def seconds(self) -> float:
        """Since the last round ended, or something began to run."""
        return max(self._clock() - self._since, 0.0)


def health_of(
    pulse: Pulse, failure: BaseException | None, closed: bool, draining: bool, exclusive: bool, active: bool
) -> Health:
    """What is the matter with a worker; the first state that holds is told.

    `exclusive`: a section has the models. `active`: some request has a slot.
    """
    states: dict[State, bool] = {
        "failed": failure is not None,
        "closed": closed,
        "draining": draining,
        "exclusive": exclusive,
        "running": active,
        "idle": True,
    }
    waits: dict[Wait, bool] = {
        "exclusive section": exclusive,
        "round": pulse.in_round,
        "request": not (active or closed),
    }
    return Health(
        state=next(state for state, holds in states.items() if holds),
        rounds=pulse.rounds,
        seconds_since_round=pulse.seconds if active else None,
        waiting_for=next((wait for wait, holds in waits.items() if holds), None),
        error=repr(failure) if failure else None,
    )
