"""How an engine is: how much is in it, and whether its worker makes rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

State = Literal["idle", "running", "exclusive", "draining", "stuck", "closed", "failed"]
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
    does), "draining", "stuck" (a round takes longer than `LoadOptions.stall_timeout`), "closed" (or about to be, or in
    a forked child), "failed" (the worker ended by a bug of ours). `error` says which bug, or that this is a child.
    `rounds`: those that have ended. `seconds_since_round`: since the last round ended, or since the first of what runs
    got its slot if that was later; None where nothing runs. `waiting_for`: what the worker waits for, None where for
    nothing.
    """

    state: State
    rounds: int
    seconds_since_round: float | None
    waiting_for: Wait | None
    error: str | None = None


class Pulse:
    """The worker's rounds as they come and go; read from any thread, without a lock. `clock`: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.rounds, self.in_round, self.working = 0, False, False
        self._clock, self.since = clock, clock()

    def begin(self) -> None:
        """Something runs again, after nothing did."""
        self.since = self._clock()

    @contextmanager
    def work(self) -> Iterator[None]:
        """What the worker does between two waits for something to do: rounds, their texts, and results."""
        self.since, self.working = self._clock(), True
        try:
            yield
        finally:
            self.working = False

    def stuck(self, timeout: float | None) -> bool:
        """Whether the worker has worked for longer than `timeout` seconds without the end of a round."""
        return timeout is not None and self.working and self.seconds > timeout

    @contextmanager
    def round(self) -> Iterator[None]:
        """A round, however it ends."""
        self.in_round = True
        try:
            yield
        finally:
            self.in_round, self.rounds = False, self.rounds + 1
            self.since = self._clock()

    @property
    def seconds(self) -> float:
        """Since the last round ended, or something began to run."""
        return max(self._clock() - self.since, 0.0)


def health_of(
    pulse: Pulse,
    failure: BaseException | str | None,
    closed: bool,
    draining: bool,
    exclusive: bool,
    active: bool,
    stall_timeout: float | None = None,
) -> Health:
    """What is the matter with a worker; the first state that holds is told.

    `failure`: what ended it; a text, why it is closed. `exclusive`: a section has the models. `active`: some request
    has a slot.
    """
    states: dict[State, bool] = {
        "failed": isinstance(failure, BaseException),
        "closed": closed,
        "stuck": pulse.stuck(stall_timeout),
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
        error=failure if isinstance(failure, str | None) else repr(failure),
    )
