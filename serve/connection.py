"""A client's connection, which is closed if the headers of a request do not arrive in time."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from . import limits


class Connection(H11Protocol):
    """Uvicorn's connection with a time limit for headers; Uvicorn limits only how long it is idle between requests."""

    header_seconds = limits.HEADER_SECONDS
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit when a client connects."""
        super().connection_made(transport)
        self._expect()

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
        self._late = self.loop.call_later(self.header_seconds, self.transport.abort)

    def _settle(self) -> None:
        if self._late:
            self._late.cancel()
        self._late = None
