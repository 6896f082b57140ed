"""The state of an engine: how many requests and tokens it holds, and whether its worker makes rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

State = Literal["idle", "running", "exclusive", "draining", "stuck", "closed", "failed"]
Wait = Literal["request", "round", "exclusive section"]


@dataclass(frozen=True, slots=True)
class Usage:
    """The requests and tokens that an engine holds, counted at one moment.

    Attributes:
        waiting: Requests without a slot, including those whose callers wait for room in the queue.
        to_come: Requests that a `generate` or `stream` under way has yet to submit.
        running: Requests with a slot.
        slots: Number of slots.
        max_waiting: Maximum requests in the queue.
        cache_tokens: Tokens of running texts in the target's KV cache.
        reusable_tokens: Tokens kept in free slots, for prompts that begin the same.
        cache_capacity_tokens: Tokens that all slots hold together; with paged caches, that all pages hold. A page that
            several texts share counts once here, but its tokens count for each of them in `cache_tokens`.
        dropped_results: Results that `on_finish` never received.
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
    """The state of an engine's worker.

    Attributes:
        state: "idle" (nothing to do), "running", "exclusive" (a caller uses the models alone, as `logits` does),
            "draining", "stuck" (a round takes longer than `LoadOptions.stall_timeout`), "closed" (also: closing, or in
            a forked child) or "failed" (a bug in specbuild ended the worker).
        rounds: Rounds that have ended.
        seconds_since_round: Seconds since the last round ended, or since a request got a slot after none had one, if
            that was later; None if nothing runs.
        waiting_for: What the worker waits for; None: nothing.
        error: The bug that ended the worker, or that this process is a forked child; None otherwise.
    """

    state: State
    rounds: int
    seconds_since_round: float | None
    waiting_for: Wait | None
    error: str | None = None


class Pulse:
    """Tracks the worker's rounds; readable from any thread without a lock. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.rounds, self.in_round, self.working = 0, False, False
        self._clock, self.since = clock, clock()

    def begin(self) -> None:
        """Note that a request runs again after none did."""
        self.since = self._clock()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Mark the worker as working, from one wait for work to the next."""
        self.since, self.working = self._clock(), True
        try:
            yield
        finally:
            self.working = False

    def stuck(self, timeout: float | None) -> bool:
        """Return whether the worker has worked for more than `timeout` seconds without finishing a round."""
        return timeout is not None and self.working and self.seconds > timeout

    @contextmanager
    def round(self) -> Iterator[None]:
        """Count a round, however it ends."""
        self.in_round = True
        try:
            yield
        finally:
            self.in_round, self.rounds = False, self.rounds + 1
            self.since = self._clock()

    @property
    def seconds(self) -> float:
        """Seconds since the last round ended, or since something began to run."""
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
    """Return a worker's `Health`, with the first state that holds in the order of `states`.

    Args:
        pulse: The worker's rounds.
        failure: The error that ended the worker, or a text that says why it is closed.
        closed: Whether the scheduler is closed.
        draining: Whether it drains.
        exclusive: Whether an exclusive section is open.
        active: Whether some request has a slot.
        stall_timeout: Seconds after which a round counts as stuck; None: never.
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
