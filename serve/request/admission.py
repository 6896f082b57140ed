"""Admission control: reserves room in a model's queue before anything is tokenized."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from specbuild.serve.errors import ApiError

_WEIGHT = 0.2  # weight of the latest request in the moving average of requests' seconds
_LONGEST = 600  # maximum seconds that a client is told to wait


@dataclass(slots=True)
class Ticket:
    """A request's room: its samples until it ends, its prompts' tokens until its first chunk."""

    admission: Admission
    samples: int
    tokens: int = 0
    decoded: bool = False  # whether its first chunk has come

    def read(self, tokens: int) -> None:
        """Reserve room for the tokens of the prompts, which have been tokenized. Raises ApiError."""
        waiting, most = self.admission.tokens, self.admission.max_tokens
        if most is not None and waiting and waiting + tokens > most:
            told = f"{waiting} tokens of prompts wait, of at most {most}: try again later"
            raise ApiError(429, told, code="queued_tokens", retry_after=self.admission.wait(self.samples))
        self.admission.tokens, self.tokens = waiting + tokens, tokens

    def started(self) -> None:
        """Note that the first chunk has come, so none of the tokens waits."""
        self.decoded = True
        self.free()

    def free(self) -> None:
        """Free the room of the tokens."""
        self.admission.tokens -= self.tokens
        self.tokens = 0


class Admission:
    """Counts the requests of one engine. For the event loop's thread only. `idle` is set while there are none.

    Args:
        slots: Samples that run at once.
        max_waiting: Samples that wait at most.
        max_queued_tokens: Maximum prompt tokens that wait for their first token; None: any number. A request on its own
            may have more.
        clock: Returns seconds.
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
        self.max_samples, self._slots, self.max_tokens = slots + max_waiting, slots, max_queued_tokens
        self._clock, self._seconds = clock, 1.0

    @contextmanager
    def room(self, samples: int, param: str = "n") -> Iterator[Ticket]:
        """Hold room for a request's samples during the `with` block; raises ApiError 400, 429 or 503.

        `param`: the field that is to blame for too many samples.
        """
        if self.draining:
            told = "the server is draining: send the request to another one"
            raise ApiError(503, told, code="draining", retry_after=self.wait(0))
        if samples > self.max_samples:
            raise ApiError(
                400,
                f"the request has {samples} samples, and the server holds {self.max_samples}: send fewer",
                param=param,
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
            ticket.free()
            self.samples, self.requests = self.samples - samples, self.requests - 1
            if not self.requests:
                self.idle.set()
            if ticket.decoded:  # what is refused at once says nothing of how long others take
                self._seconds += _WEIGHT * (self._clock() - began - self._seconds)

    def wait(self, samples: int) -> int:
        """Estimate the seconds until `samples` more samples find room, or with 0 until all have ended.

        The estimate uses a moving average of recent requests' seconds.
        """
        ahead = max(self.samples + samples - self.max_samples, 1) if samples else self.samples
        return min(max(math.ceil(ahead * self._seconds / self._slots), 1), _LONGEST)
