"""A client's connection: closed where the headers of a request do not come in time."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from . import limits


class Connection(H11Protocol):
    """Uvicorn's, which bounds by itself only how long a connection is idle between two requests."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected, and has to ask."""
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Whatever comes: the clock runs from the first byte of a request to the end of its headers."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._settle()
        elif not self._late:
            self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client, or the clock, ended it."""
        self._settle()
        super().connection_lost(exc)

    def _expect(self) -> None:
        self._late = self.loop.call_later(limits.HEADER_SECONDS, self.transport.abort)

    def _settle(self) -> None:
        if self._late:
            self._late.cancel()
        self._late = None
