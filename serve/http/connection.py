"""A client's connection, closed if a request's headers do not arrive in time, or if it is idle and others need room."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from specbuild.serve import limits


class Connection(H11Protocol):
    """Uvicorn's connection with a time limit for headers; Uvicorn limits only how long it is idle between requests."""

    header_seconds = limits.HEADER_SECONDS
    max_connections = limits.CONNECTIONS
    since = 0.0  # when it was opened, or its last request began
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit when a client connects."""
        super().connection_made(transport)
        self._expect()
        if len(self.connections) > self.max_connections:
            others = (each for each in self.connections if isinstance(each, Connection) and each is not self)
            if longest := min((each for each in others if each.idle), key=lambda each: each.since, default=None):
                longest.transport.abort()

    @property
    def idle(self) -> bool:
        """Return whether it is between two requests, or before its first."""
        return self.conn.their_state is h11.IDLE and (self.cycle is None or self.cycle.response_complete)

    def data_received(self, data: bytes) -> None:
        """Run the time limit from the first byte of a request to the end of its headers."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._settle()
        elif not self._late:
            self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit when the connection ends."""
        self._settle()
        super().connection_lost(exc)

    def _expect(self) -> None:
        self.since = self.loop.time()
        self._late = self.loop.call_later(self.header_seconds, self.transport.abort)

    def _settle(self) -> None:
        if self._late:
            self._late.cancel()
        self._late = None
