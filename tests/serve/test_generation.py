"""Generation: what ends a request, what a client that leaves does to it, and what is said of it."""

import asyncio
from types import SimpleNamespace

import pytest
from asgi import GONE, call

from specbuild.runtime import Chunk, RequestMetrics, Result
from specbuild.runtime.errors import ExecutionError
from specbuild.serve.errors import ApiError
from specbuild.serve.handle_request import events, whole
from specbuild.serve.openai.chat import ChatFormat
from specbuild.serve.openai.completions import CompletionFormat
from specbuild.serve.openai.responses import metrics, usage
from specbuild.serve.options import ServeOptions
from specbuild.serve.request.generation import ClientGoneError, EventStream, checked, unless_gone


@pytest.mark.parametrize(
    ("reason", "error", "status"),
    [("error", ExecutionError("NaN"), 500), ("error", None, 500), ("cancelled", None, 503), ("deadline", None, 408)],
)
def test_ends_that_are_errors(reason, error, status):
    with pytest.raises(ApiError) as told:
        checked(Result("", [1] * (reason == "cancelled"), reason, None, error=error))
    assert told.value.status == status


def test_metrics_and_usage_of_several_samples():
    def of(ttft, queue):
        times = {"submitted": 0.0, "started": queue, "first_token": ttft, "finished": 9.0}
        own = RequestMetrics(3, 1, "auto", **times)
        own.speculative_decoding.record(4, 2)
        return Result("", [1], "stop", own)

    told = metrics([of(1, 0.5), of(2, 1.5)], "summary")
    drafted = told["speculative_decoding"]["num_draft_tokens"]
    assert (told["ttft"], told["queue_time"], told["e2el"], drafted) == (1, 1.5, 9.0, 8)
    assert metrics([Result("", [], "error", None)], "detailed") == {}
    counted = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert usage(3, 4, 2) == counted | {"prompt_tokens_details": {"cached_tokens": 2}}


async def leave():
    await asyncio.sleep(0.001)
    return {"type": "http.disconnect"}


def test_a_client_that_leaves_cancels_the_work():
    cleaned = []

    async def work():
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
def test_events_end_with_their_reader(reads):
    """Also where the client left before the first."""
    closed = list[bool]()

    async def events():
        try:
            yield b"one"
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    async def stuck(message):
        await asyncio.Event().wait()

    sent = call(EventStream(events()), {"type": "http"}, [] if reads else [GONE], True, None if reads else stuck)
    assert closed == [True]
    assert [message.get("body") for message in sent] == ([None, b"one"] if reads else [])


@pytest.mark.parametrize("form", [ChatFormat, CompletionFormat])
def test_a_format_that_fails_leaves_its_generation(form):
    """At once, and not when the garbage is collected: so its slot is free for the next request."""
    closed = list[bool]()

    async def chunks():
        try:
            while True:
                yield Chunk(0, 0, "x", [1], None, None)
        finally:
            closed.append(True)

    def choice(chunk):
        raise KeyError(chunk.index)

    body = SimpleNamespace(return_token_ids=True, stream_options=None, return_token_sources=False)
    served = SimpleNamespace(name="m", manifest=SimpleNamespace(digest="d" * 64))
    given = SimpleNamespace(body=body, served=served, choice=choice, request_id="id")

    async def ask(streams):
        made = form(given, ServeOptions())
        with pytest.raises(KeyError):
            await (anext(events(made, chunks())) if streams else whole(made, chunks()))
        return closed[:]

    assert asyncio.run(ask(streams=False)) == [True]
    assert asyncio.run(ask(streams=True)) == [True, True]
