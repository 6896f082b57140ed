"""Generation: what ends a request, what a client that leaves does to it, and what is said of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from specbuild.runtime import RequestMetrics, Result, SpeculationStats
from specbuild.runtime.errors import ExecutionError
from specbuild.serve.errors import ApiError
from specbuild.serve.generation import ClientGoneError, EventStream, checked, unless_gone
from specbuild.serve.responses import finish_reason, metrics, usage


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


@pytest.mark.parametrize(
    ("reason", "stop", "told"),
    [
        *(("stop", "\n", ("stop", "\n")), ("stop", None, ("stop", None)), ("length", None, ("length", None))),
        ("deadline", None, ("length", "deadline")),
    ],
)
def test_ends_that_are_texts(reason: str, stop: str | None, told: tuple[str, str | None]) -> None:
    result = Result("x", [1], reason, None, stop_reason=stop)
    assert checked(result) is result
    assert finish_reason(result) == told


def test_metrics_and_usage_of_several_samples() -> None:
    def of(ttft: float, queue: float) -> Result:
        stats = SpeculationStats()
        stats.record(4, 2)
        times = {"submitted": 0.0, "started": queue, "first_token": ttft, "finished": 9.0}
        return Result("", [1], "stop", RequestMetrics(3, 1, "auto", speculative_decoding=stats, **times))  # type: ignore[arg-type]

    told, counts = metrics([of(1, 0.5), of(2, 1.5)], "summary"), "speculative_decoding"
    assert (told["ttft"], told["queue_time"], told["e2el"], told[counts]["num_draft_tokens"]) == (1, 1.5, 9.0, 8)
    assert "acceptance_histogram" not in told[counts]
    assert metrics([of(1, 0)], "detailed")[counts]["acceptance_histogram"] == [0, 0, 1]
    assert metrics([of(1, 0)], "none") == metrics([Result("", [], "error", None)], "detailed") == {}
    counted = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert usage(3, 4) == counted
    assert usage(3, 4, 2) == counted | {"prompt_tokens_details": {"cached_tokens": 2}}


async def leave() -> dict[str, Any]:
    await asyncio.sleep(0.001)
    return {"type": "http.disconnect"}


def test_a_client_that_leaves_cancels_the_work() -> None:
    cleaned = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    with pytest.raises(ClientGoneError):
        asyncio.run(unless_gone(leave, work()))
    assert cleaned == [True], "before anything else happens"
    assert asyncio.run(unless_gone(leave, asyncio.sleep(0, 3))) == 3, "which was done first"


@pytest.mark.parametrize("reads", [True, False])
def test_events_end_with_their_reader(reads: bool) -> None:
    """Also where the client left before the first."""
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
            if not reads:
                await asyncio.Event().wait()
            sent.append(message)
            if message.get("body") == b"one":
                shown.set()

        async def receive() -> dict[str, Any]:
            if reads:
                await shown.wait()
            return {"type": "http.disconnect"}

        await EventStream(events())({"type": "http"}, receive, send)

    asyncio.run(main())
    assert closed == [True]
    if reads:
        assert [message.get("body") for message in sent] == [None, b"one"]
        assert b"text/event-stream" in dict(sent[0]["headers"])[b"content-type"]
