"""Admission: room in a model's queue, reserved before anything is tokenized."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .errors import ApiError

_WEIGHT = 0.2  # of the latest request in the mean of what requests take
_LONGEST = 600  # seconds that a client is ever told to wait


class Ticket:
    """A request's room: samples until it ends, tokens of its prompts until its first chunk."""

    def __init__(self, admission: Admission, samples: int) -> None:
        self.samples, self.tokens, self._admission = samples, 0, admission

    def read(self, tokens: int) -> None:
        """The prompts are tokenized, and have so many tokens. Raises ApiError."""
        self._admission.queue_tokens(self, tokens)

    def started(self) -> None:
        """The first chunk is here, and nothing of it waits any more."""
        self._admission.tokens -= self.tokens
        self.tokens = 0


class Admission:
    """Counts what one engine was given; for the event loop's thread alone.

    `max_samples`: that run or wait at once. `max_queued_tokens`: of prompts that wait for their first token, None for
    any number; one request alone may have more. `idle` is set while there are no requests.
    """

    def __init__(
        self,
        slots: int,
        max_waiting: int,
        max_queued_tokens: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.samples = self.tokens = self.requests = 0
        self.draining, self.idle = False, asyncio.Event()
        self.idle.set()
        self.max_samples, self._slots, self._max_tokens = slots + max_waiting, slots, max_queued_tokens
        self._clock, self._seconds = clock, 1.0

    @contextmanager
    def room(self, samples: int) -> Iterator[Ticket]:
        """Room for a request's samples, until the body ends; raises ApiError 400, 429 or 503."""
        if self.draining:
            raise ApiError(
                503,
                "the server is draining: send the request to another one",
                code="draining",
                retry_after=self.wait(0),
            )
        if samples > self.max_samples:
            raise ApiError(
                400,
                f"the request has {samples} samples, and the server holds {self.max_samples}: send fewer",
                param="n",
                code="too_many_samples",
            )
        if self.samples + samples > self.max_samples:
            told = f"the queue holds {self.max_samples} requests and is full: try again later"
            raise ApiError(429, told, code="queue_full", retry_after=self.wait(samples))
        ticket, began = Ticket(self, samples), self._clock()
        self.idle.clear()
        self.samples, self.requests = self.samples + samples, self.requests + 1
        try:
            yield ticket
        finally:
            ticket.started()
            self.samples, self.requests = self.samples - samples, self.requests - 1
            if not self.requests:
                self.idle.set()
            self._seconds += _WEIGHT * (self._clock() - began - self._seconds)

    def queue_tokens(self, ticket: Ticket, tokens: int) -> None:
        """See `Ticket.read`."""
        if self._max_tokens is not None and self.tokens and self.tokens + tokens > self._max_tokens:
            told = f"{self.tokens} tokens of prompts wait, of at most {self._max_tokens}: try again later"
            raise ApiError(429, told, code="queued_tokens", retry_after=self.wait(ticket.samples))
        self.tokens += tokens
        ticket.tokens = tokens

    def wait(self, samples: int) -> int:
        """Seconds until so many more samples should find room, from what requests took lately."""
        ahead = max(self.samples + samples - self.max_samples, 1) if samples else self.samples
        return min(max(math.ceil(ahead * self._seconds / self._slots), 1), _LONGEST)
