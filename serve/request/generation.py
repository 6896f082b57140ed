"""One request's way through an engine: admission, preparation, chunks, and an end even if the client leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from specbuild.runtime import Chunk, Engine, Result, SamplingParams, StructuredOutputs
from specbuild.runtime.errors import InputError
from specbuild.serve.errors import ApiError, api_error, blaming

from .admission import Ticket
from .fields import CompletionRequest, Sampling
from .grammars import GrammarCompiler
from .models import ServedModel
from .parameters import Caller, speculation_field, structure_field
from .prepare import PromptState, prepare, prompts_of

Value = TypeVar("Value")


class Gaps(Protocol):
    """Is told of the time between two chunks; see `Metrics.chunk`."""

    def chunk(self, model: str, gap_seconds: float, tokens: int) -> None:
        """Record that a sample emitted `tokens` tokens `gap_seconds` after its last chunk."""
        ...


@dataclass(frozen=True, slots=True)
class Workers:
    """The threads that prepare requests, the compiler of their grammars, and the metrics."""

    preparing: ThreadPoolExecutor
    grammars: GrammarCompiler
    metrics: Gaps


@dataclass(frozen=True, slots=True)
class Draw:
    """A request's arm in a canary.

    fresh: whether it is its key's first request, for which the arm was drawn; later ones have the same arm and are no
    evidence.
    """

    candidate: bool
    fresh: bool = True


@dataclass(slots=True)
class Generation:
    """A request whose prompts become texts.

    prompts, echoed, params, reasoning: see `Prepared`; set when it has been prepared. queued: whether nothing of it can
    be refused any more. results: the samples that have ended.
    """

    served: ServedModel
    body: Sampling
    caller: Caller
    request_id: str = ""
    draw: Draw | None = None  # its draw of a canary's arm, if it takes part in one
    status: int = 200  # HTTP status, once it has ended; 499: the client left
    prompts: list[list[int]] = field(default_factory=list)
    echoed: list[str] = field(default_factory=list)
    params: SamplingParams = field(default_factory=SamplingParams)
    reasoning: PromptState = None
    queued: bool = False
    results: dict[int, Result] = field(default_factory=dict)  # by number of the choice

    @property
    def engine(self) -> Engine:
        """The engine behind the model."""
        return self.served.engine.engine

    @property
    def tenant(self) -> str | None:
        """The hash of its API key; None: there are no keys."""
        return self.caller.tenant

    @property
    def arm(self) -> str | None:
        """Name of its canary arm; None if it is in none."""
        if self.draw is None:
            return None
        return "candidate" if self.draw.candidate else "baseline"

    @property
    def samples(self) -> int:
        """Number of samples of each prompt."""
        return self.body.n or 1

    def choice(self, chunk: Chunk) -> int:
        """Return the number of a chunk's choice, counted prompt by prompt and sample by sample."""
        return chunk.index * self.samples + chunk.sample

    async def chunks(self, workers: Workers) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of all samples as their texts grow or, without streaming, one chunk per sample at its end.

        Closing the generator cancels what runs and frees the room in the queue. Raises ApiError and SpecbuildErrors.
        """
        count = len(prompts_of(self.body)) if isinstance(self.body, CompletionRequest) else 1
        structure, last = structure_field(self.body), dict[int, float]()
        with self.served.admission.room(count * self.samples, "n" if self.samples > 1 else "prompt") as ticket:
            constraint = await self._prepare(workers, ticket, structure)
            self.queued = True
            async with aclosing(self._decoded()) as chunks:
                async for chunk in chunks:
                    ticket.started()
                    number = self.choice(chunk)
                    if chunk.result:
                        self.results[number] = checked(chunk.result, structure)
                    if chunk.token_ids:
                        now = time.perf_counter()
                        if number in last:
                            workers.metrics.chunk(self.served.name, now - last[number], len(chunk.token_ids))
                        last[number] = now
                    yield chunk
            del constraint

    async def _prepare(self, workers: Workers, ticket: Ticket, structure: str | None) -> object:
        """Set what the request is decoded from; return its constraint, which stays cached while it is held."""
        preparing = asyncio.get_running_loop().run_in_executor(
            workers.preparing, prepare, self.served, self.body, self.caller
        )
        self.prompts, self.echoed, self.params, self.reasoning, constraint = await preparing
        ticket.read(sum(map(len, self.prompts)))
        outputs = self.params.structured_outputs
        if constraint is None and outputs is not None:
            with blaming(structure, "structured_outputs"):
                return await workers.grammars.constraint(self.engine, StructuredOutputs.of(outputs))
        return constraint

    async def _decoded(self) -> AsyncGenerator[Chunk, None]:
        """Yield the engine's chunks; what it refuses is the error of a field."""
        try:
            if self.body.stream:
                async with aclosing(self.served.engine.stream(self.prompts, self.params)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            results = await self.served.engine.generate(self.prompts, self.params)
        except InputError as error:
            told = str(error).removeprefix("prompt 1: ") if len(self.prompts) == 1 else str(error)
            raise ApiError(400, told, param=speculation_field(self.body) or "max_tokens") from None
        for number, result in enumerate(results):
            index, sample = divmod(number, self.samples)
            own = result.token_ids, result.logprobs, result, result.drafted, result.prompt_logprobs
            yield Chunk(index, sample, result.text, *own)


class Watcher(Protocol):
    """Is told of ended requests on the event loop's thread; work longer than microseconds belongs in `run`."""

    def ended(self, generation: Generation) -> None:
        """Handle the end of a request, of any kind: `generation.results` has the samples that ended. Must not raise."""
        ...

    async def run(self) -> None:
        """Work alongside the requests until cancelled; may return if there is nothing to do."""
        ...


def checked(result: Result, structure: str | None = None) -> Result:
    """Return a result that has a text; raises ApiError if it failed, was cut off, or had no time for a single token.

    `structure`: the field that constrains the text.
    """
    if result.finish_reason == "error":
        raise api_error(result.error, structure) if result.error else ApiError(500, "decoding failed")
    if result.finish_reason == "cancelled":
        raise ApiError(503, "the server was stopped before this was done: send it to another one", code="draining")
    if result.finish_reason == "deadline" and not result.token_ids:
        raise ApiError(408, "time ran out before the first token: try later, or allow more", code="deadline")
    return result


class ClientGoneError(Exception):
    """The client has closed its connection."""


async def gone(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Value] | Awaitable[Value]) -> Value:
    """Return or raise what `work` does; if the client leaves first, cancel it and raise ClientGoneError."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        await cancelled(working, leaving)


async def cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have cleaned up; what they raise is ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events; when the client leaves, their generator is closed at once."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def drain(self) -> None:
        """Run the generator to its end without sending the events."""
        async with aclosing(self._events) as events:
            async for _ in events:
                pass

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send every event; see Starlette's `Response`."""
        with suppress(ClientGoneError):
            await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)  # only a generator that has begun runs its cleanup when it is closed
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
