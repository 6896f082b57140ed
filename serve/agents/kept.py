"""Responses under way and responses that were kept, by whose they are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from pydantic import ValidationError

from specbuild.serve.errors import ApiError

from .fields import Item
from .store import Store

_LONGEST = 1000  # responses of one conversation


class Running(Protocol):
    """A response under way."""

    number: str
    body: dict[str, Any]

    def cancel(self) -> None:
        """End it soon."""
        ...


class Kept:
    """For the event loop's thread; what the store does is done in threads."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._running = dict[tuple[str | None, str], Running]()
        self._tasks = set[asyncio.Task[None]]()

    @contextmanager
    def running(self, tenant: str | None, response: Running) -> Iterator[None]:
        """Within it a response is found though it has not ended."""
        self._running[tenant, response.number] = response
        try:
            yield
        finally:
            del self._running[tenant, response.number]

    def behind(self, work: Any) -> None:
        """Let a coroutine run on though nobody waits for it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def put(self, tenant: str | None, number: str, body: Any) -> None:
        """Keep a response with its input; raises ApiError for one that does not fit."""
        if not await _in_thread(partial(self.store.put, tenant, number, body)):
            raise ApiError(413, "the response is larger than the store: say store: false")

    async def get(self, tenant: str | None, number: str) -> dict[str, Any]:
        """The response, under way or kept; raises ApiError."""
        if found := self._running.get((tenant, number)):
            return found.body
        return dict((await self._row(tenant, number))["response"])

    async def items(self, tenant: str | None, number: str) -> list[dict[str, Any]]:
        """A kept response's input; raises ApiError."""
        return list((await self._row(tenant, number))["input"])

    async def delete(self, tenant: str | None, number: str) -> None:
        """Forget it; raises ApiError."""
        if not await _in_thread(partial(self.store.delete, tenant, number)):
            raise _unknown(number)

    async def cancel(self, tenant: str | None, number: str) -> dict[str, Any]:
        """The response, whose work is ended; raises ApiError for one that has ended already."""
        found = self._running.get((tenant, number))
        if found is None:
            ended = await self.get(tenant, number)
            if ended["status"] == "cancelled":
                return ended
            raise ApiError(400, f"{number} has ended, as {ended['status']}: there is nothing to cancel")
        found.cancel()
        while self._running.get((tenant, number)) is found:
            await asyncio.sleep(0.01)
        return found.body

    async def conversation(self, tenant: str | None, last: str | None) -> list[Item]:
        """All items up to a response, its output too; raises ApiError where a part of it is not there any more."""
        parts, number = list[list[Any]](), last
        while number is not None:
            if len(parts) >= _LONGEST:
                raise ApiError(400, f"the conversation has more than {_LONGEST} responses: begin another")
            row = await self._row(tenant, number, "previous_response_id")
            if row["response"]["status"] not in ("completed", "incomplete"):
                raise ApiError(400, f"{number} is {row['response']['status']}: nothing goes on with it")
            parts.append([*row["input"], *row["response"]["output"]])
            number = row["response"]["previous_response_id"]
        try:
            return [Item.model_validate(item) for part in reversed(parts) for item in part]
        except ValidationError as error:
            raise ApiError(400, f"{last} cannot be read back: {error.errors()[0]['msg']}") from None

    async def _row(self, tenant: str | None, number: str, param: str | None = None) -> dict[str, Any]:
        if found := await _in_thread(partial(self.store.get, tenant, number)):
            return dict(found)
        raise _unknown(number, param)


def _unknown(number: str, param: str | None = None) -> ApiError:
    told = f"there is no response {number[:64]!r}: it was deleted, never stored, or made way for newer ones"
    return ApiError(404, told, param=param)


async def _in_thread(work: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, work)
