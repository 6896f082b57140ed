"""Generation: what ends a request, and what a client that leaves does to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from specbuild.runtime import Result
from specbuild.runtime.errors import ExecutionError
from specbuild.serve.errors import ApiError
from specbuild.serve.generation import ClientGoneError, EventStream, checked, unless_gone


@pytest.mark.parametrize(
    ("result", "status"),
    [
        (Result("", [], "error", None, error=ExecutionError("NaN")), 500),
        (Result("", [], "error", None), 500),
        (Result("x", [1], "cancelled", None), 503),
        (Result("", [], "deadline", None), 408),
    ],
)
def test_ends_that_are_errors(result: Result, status: int) -> None:
    with pytest.raises(ApiError) as told:
        checked(result)
    assert told.value.status == status


@pytest.mark.parametrize("reason", ["stop", "length", "deadline"])
def test_ends_that_are_texts(reason: str) -> None:
    result = Result("x", [1], reason, None)
    assert checked(result) is result


async def never() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


def test_work_that_is_done_first() -> None:
    async def work() -> int:
        return 3

    assert asyncio.run(unless_gone(never, work())) == 3


def test_a_client_that_leaves_cancels_the_work() -> None:
    cleaned = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    async def leave() -> dict[str, Any]:
        await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGoneError):
        asyncio.run(unless_gone(leave, work()))
    assert cleaned == [True], "before anything else happens"


def test_events_end_with_their_reader() -> None:
    closed, sent = [], list[Any]()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"one"
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    async def main() -> None:
        shown = asyncio.Event()

        async def send(message: Any) -> None:
            sent.append(message)
            if message.get("body") == b"one":
                shown.set()

        async def receive() -> dict[str, Any]:
            await shown.wait()
            return {"type": "http.disconnect"}

        await EventStream(events())({"type": "http"}, receive, send)

    asyncio.run(main())
    assert closed == [True]
    assert [message.get("body") for message in sent] == [None, b"one"]
    assert b"text/event-stream" in dict(sent[0]["headers"])[b"content-type"]


def test_events_end_where_the_client_left_before_the_first() -> None:
    closed = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"one"
            yield b"two"
        finally:
            closed.append(True)

    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    asyncio.run(EventStream(events())({"type": "http"}, receive, send))
    assert closed == [True]
