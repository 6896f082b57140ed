"""Answer a text-generation request: from its parsed body to its response, log line, metrics and trace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response

from specbuild.runtime import Chunk, Result
from specbuild.serve.openai.formats import Format
from specbuild.serve.request import tools
from specbuild.serve.request.fields import ChatRequest, Sampling
from specbuild.serve.request.generation import ClientGoneError, EventStream, Generation, cancelled, unless_gone
from specbuild.serve.request.parameters import Caller
from specbuild.serve.telemetry.logs import error_of
from specbuild.serve.telemetry.traces import Trace

from .errors import ApiError, api_error, json_response
from .options import ServeOptions
from .service import Service

_GONE = (ClientGoneError, asyncio.CancelledError, GeneratorExit)  # the client no longer waits for the answer
PING = b": ping\n\n"  # a comment of server-sent events, which no client shows
Done = Callable[[BaseException | None], None]
Kind = TypeVar("Kind", bound=Format)
Formats = Callable[[Generation, ServeOptions], Kind]  # makes the format of a generation


async def answer(service: Service, request: Request, body: Sampling, kind: Formats[Format]) -> Response:
    """Answer a text-generation request, streamed or whole; see `begin` and `respond`."""
    return await respond(service, request, await begin(service, request, body, kind))


async def begin(service: Service, request: Request, body: Sampling, kind: Formats[Kind]) -> Kind:
    """Return the format of a request that may be decoded: its key's limits, its model and its arm are known.

    Args:
        service: The server's models, options and watchers.
        request: The HTTP request; `Gate` has set `request_id`, `tenant` and `told` in its state.
        body: The request's fields.
        kind: Makes the format of the response.

    Raises:
        ApiError: If the request is refused.
    """
    options, state = service.options, request.state
    _count(service, state)
    body = _checked(body)
    state.request_id = body.request_id or state.request_id
    served, way, draw = service.models.pick(body.model), None, None
    if service.canary:
        served, way, draw = service.canary.assign(served, body, state.tenant)
    state.told.update(model=served.name, user=body.user or body.safety_identifier)
    caller = Caller(
        state.tenant,
        options.share_prefix_cache,
        options.request_timeout,
        service.oracle is None or served.name not in service.oracle.stopped,
        options.reasoning_end,
        way,
        options.reading,
    )
    return kind(Generation(served, body, caller, state.request_id, draw), options)


def _count(service: Service, state: Any) -> None:
    """Count a request against its key's limits, and note what is left for its headers; raises ApiError."""
    try:
        service.rates.begin(state.tenant)
    finally:
        state.headers = service.rates.headers(state.tenant)


def _checked(body: Sampling) -> Sampling:
    """Return a body whose tools are those that may be called; raises ApiError for fields that contradict each other."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        name = "stream_options.include_obfuscation"
        raise ApiError(400, f"{name} is not supported: events have no padding here, say false", param=name)
    if body.store:
        raise ApiError(400, "store: nothing is stored here: leave it out, or use /v1/responses", param="store")
    return tools.narrowed(body) if isinstance(body, ChatRequest) else body


async def respond(service: Service, request: Request, form: Format) -> Response:
    """Decode a request and return its response, whole or as a stream.

    Raises:
        ApiError: If the request is refused, or fails before its response begins.
        SpecbuildError: If tokenizing or decoding fails before the response begins.
        ClientGoneError: If the client leaves before the response begins.
    """
    generation = form.generation
    trace = service.traces.begin(form.operation, generation.served.name, request.headers, generation.body)
    done = partial(_done, service, request.state.told, form, trace)
    chunks = form.follow(generation.chunks(service.workers))
    try:
        if generation.body.stream:
            return await _streamed(service, request, form, chunks, done)
        response = json_response(await unless_gone(request.receive, whole(form, chunks)))
    except (Exception, asyncio.CancelledError) as error:
        done(error)
        raise
    done(None)
    return response


async def whole(form: Format, chunks: AsyncGenerator[Chunk, None]) -> dict[str, Any]:
    """Return the whole response; raises the generation's errors."""
    async with aclosing(chunks):
        async for chunk in chunks:
            form.add(chunk)
    await form.finish()
    if form.failed:
        raise form.failed
    return form.whole()


async def events(form: Format, chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[bytes, None]:
    """Yield all events of a stream that does not fail; raises the generation's errors."""
    async with aclosing(chunks):
        async for chunk in chunks:
            for event in form.part(chunk):
                yield event
    await form.finish()
    for event in form.last():
        yield event


async def _streamed(
    service: Service, request: Request, form: Format, chunks: AsyncGenerator[Chunk, None], done: Done
) -> EventStream:
    """Return the response of a stream once its first event is there, or has been waited for long enough."""
    coming = events(form, chunks)
    first = asyncio.ensure_future(anext(coming))
    try:
        await unless_gone(request.receive, asyncio.wait({first}, timeout=service.first_event_seconds))
        if first.done() and not (form.background and form.generation.queued):
            first.result()  # raises what then has a status of its own
    except BaseException:
        await cancelled(first)
        await coming.aclose()
        raise
    return EventStream(_sent(service.ping_seconds, form, first, coming, done))


async def _sent(
    ping_seconds: float, form: Format, first: asyncio.Future[bytes], coming: AsyncGenerator[bytes, None], done: Done
) -> AsyncGenerator[bytes, None]:
    """Yield comments until the first event is there, then all events; an error becomes the last one."""
    left: BaseException | None = None
    try:
        while not first.done():
            yield PING
            await asyncio.wait({first}, timeout=ping_seconds)
        yield first.result()
        async for event in coming:
            yield event
    except Exception as error:
        form.failed = error
        await form.finish()
        for event in form.last():
            yield event
    except BaseException as error:
        left = error
        raise
    finally:
        await cancelled(first)
        await coming.aclose()
        done(left)


def _done(
    service: Service, told: dict[str, Any], form: Format, trace: Trace | None, error: BaseException | None
) -> None:
    """Finish an ended request: fill its log line, count its tokens, and inform the watchers and the trace."""
    form.close()
    generation, kind = form.generation, _end(service, told, form, error)
    results = list(generation.results.values())
    told.update(_told_of(results), prompt_tokens=form.prompt_tokens)
    service.rates.spend(generation.tenant, told["prompt_tokens"] + told["output_tokens"])
    if service.options.log_requests:
        given = {name: getattr(generation.body, name, None) for name in ("prompt", "messages")}
        told["prompt"] = msgspec.json.encode({name: value for name, value in given.items() if value}).decode()
        told["text"] = json.dumps([result.text for result in results])
    for watcher in service.watchers:
        watcher.ended(generation)
    if trace:
        trace.end(told["prompt_tokens"], results, kind)


def _end(service: Service, told: dict[str, Any], form: Format, error: BaseException | None) -> str | None:
    """Set a request's status, note its error in the log line, and count a rejection; return the kind of error."""
    generation = form.generation
    if isinstance(error, _GONE):
        told["error"], generation.status = "the client left", 499
        return "499"
    failed = error or form.failed
    if failed is None:
        return None
    said = api_error(failed)
    generation.status = said.status
    if form.failed:  # after the first event the status can no longer change
        told.update(error_of(failed))
    elif said.code:
        service.metrics.rejected(generation.served.name, said.code)
    return said.code or str(said.status)


def _told_of(results: list[Result]) -> dict[str, Any]:
    """Return what the log says of samples: their tokens, why they ended, and how long they took."""
    told: dict[str, Any] = {
        "output_tokens": sum(len(result.token_ids) for result in results),
        "finish_reason": ",".join(sorted({result.finish_reason for result in results})) or None,
    }
    own = [result.metrics for result in results if result.metrics]
    if own:
        stats = [each.speculative_decoding for each in own]
        told["ttft"] = min((each.ttft for each in own if each.first_token is not None), default=None)
        told["queue_time"] = max(each.queue_time for each in own)
        told["draft_tokens"] = sum(each.num_draft_tokens for each in stats)
        told["accepted_tokens"] = sum(each.num_accepted_draft_tokens for each in stats)
    return told
