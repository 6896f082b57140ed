"""Responses in progress and stored responses, by tenant."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import msgspec

from specbuild.serve.errors import ApiError
from specbuild.serve.limits import CONVERSATION_BYTES

from .fields import Item
from .store import Store

_LAST = "previous_response_id"
_LONGEST = 1000  # maximum number of responses in a conversation


class Running(Protocol):
    """A response in progress."""

    number: str
    body: dict[str, Any]

    def cancel(self) -> None:
        """End the response soon."""
        ...


class ResponseRegistry:
    """Finds responses in progress, and reads and writes the store in threads. For the event loop's thread only."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._running = dict[tuple[str | None, str], tuple[Running, asyncio.Event]]()  # the event: it has ended
        self._tasks = set[asyncio.Task[None]]()

    def begin(self, tenant: str | None, response: Running) -> None:
        """Let a response be found until it has ended."""
        self._running[tenant, response.number] = response, asyncio.Event()

    def end(self, tenant: str | None, response: Running) -> None:
        """Forget a response that has ended, and is stored if it is to be."""
        _, ended = self._running.pop((tenant, response.number))
        ended.set()

    def behind(self, work: Any) -> None:
        """Run a coroutine in the background."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def put(self, tenant: str | None, number: str, body: Any) -> None:
        """Store a response with its input; raises ApiError if it is larger than the store."""
        if not await asyncio.to_thread(self.store.put, tenant, number, body):
            raise ApiError(413, "the response is larger than the store: say store: false")

    async def get(self, tenant: str | None, number: str) -> dict[str, Any]:
        """Return a response, in progress or stored; raises ApiError if there is none."""
        if found := self._running.get((tenant, number)):
            return found[0].body
        return dict((await self._row(tenant, number))["response"])

    async def items(self, tenant: str | None, number: str) -> list[dict[str, Any]]:
        """Return a stored response's input; raises ApiError if there is none."""
        return list((await self._row(tenant, number))["input"])

    async def delete(self, tenant: str | None, number: str) -> None:
        """Delete a stored response; raises ApiError if there is none."""
        if not await asyncio.to_thread(self.store.delete, tenant, number):
            raise _unknown(number)

    async def cancel(self, tenant: str | None, number: str) -> dict[str, Any]:
        """Cancel a response and return it; raises ApiError if there is none or it has ended in another way."""
        found = self._running.get((tenant, number))
        if found is None:
            body = await self.get(tenant, number)
            if body["status"] == "cancelled":
                return body
            raise ApiError(400, f"{number} has ended, as {body['status']}: there is nothing to cancel")
        response, ended = found
        response.cancel()
        await ended.wait()
        return response.body

    async def conversation(self, tenant: str | None, last: str | None) -> list[Item]:
        """Return all items up to a response's output; raises ApiError if one of its responses is gone or failed."""
        return list(await asyncio.to_thread(self._conversation, tenant, last))

    def _conversation(self, tenant: str | None, last: str | None) -> list[Item]:
        parts, number, size = list[list[Any]](), last, 0
        while number is not None:
            if len(parts) >= _LONGEST:
                raise ApiError(400, f"the conversation has more than {_LONGEST} responses: begin another", param=_LAST)
            size += self.store.size(tenant, number)
            if size > CONVERSATION_BYTES:
                told = f"the conversation has more than {CONVERSATION_BYTES >> 20} MiB: begin another"
                raise ApiError(400, told, param=_LAST)
            row = self.store.get(tenant, number)
            if row is None:
                raise _unknown(number, _LAST)
            if row["response"]["status"] not in ("completed", "incomplete"):
                raise ApiError(400, f"{number} is {row['response']['status']}: nothing goes on with it", param=_LAST)
            parts.append([*row["input"], *row["response"]["output"]])
            number = row["response"]["previous_response_id"]
        try:
            return msgspec.convert([item for part in reversed(parts) for item in part], list[Item])
        except msgspec.ValidationError as error:
            told = f"{last} cannot be read back: {error}"
            raise ApiError(400, told, param=_LAST) from None

    async def _row(self, tenant: str | None, number: str) -> dict[str, Any]:
        if found := await asyncio.to_thread(self.store.get, tenant, number):
            return dict(found)
        raise _unknown(number)


def _unknown(number: str, param: str | None = None) -> ApiError:
    told = f"there is no response {number[:64]!r}: it was deleted, never stored, or made way for newer ones"
    return ApiError(404, told, param=param)
