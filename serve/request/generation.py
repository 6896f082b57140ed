"""One request's way through an engine: admission, tokenizing, chunks, and an end even if the client leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from specbuild.runtime import Chunk, Constraint, Engine, Result, SamplingParams, StructuredOutputs
from specbuild.runtime.errors import InputError
from specbuild.serve.errors import ApiError, api_error, blaming
from specbuild.serve.output_parsers.reasoning import TAIL

from .fields import ChatRequest, Sampling
from .grammars import GrammarCompiler
from .models import ServedModel
from .parameters import Caller, sampling, speculation_field, structure_field

Value = TypeVar("Value")
Tokenize = Callable[[Engine], list[list[int]]]


class Observes(Protocol):
    """Is told when chunks arrive; see `Metrics.chunk`."""

    def chunk(self, model: str, gap_seconds: float, tokens: int) -> None:
        """Record that a sample emitted `tokens` tokens `gap_seconds` after its last chunk."""
        ...


@dataclass(frozen=True, slots=True)
class Draw:
    """A request's arm in a canary.

    weight: the probability of the candidate. number: the request's number in the canary. fresh: whether it is its key's
    first request, for which the arm was drawn; later ones have the same arm and are no evidence.
    """

    candidate: bool
    weight: float
    number: int
    fresh: bool = True


@dataclass(slots=True)
class Generation:
    """A request whose prompts become texts.

    prompts, params: set when it has been tokenized. queued: whether nothing of it can be refused any more. results: the
    samples that have ended.
    """

    served: ServedModel
    body: Sampling
    caller: Caller
    count: int  # number of prompts
    pool: ThreadPoolExecutor  # threads for tokenizing
    grammars: GrammarCompiler
    observer: Observes | None = None
    request_id: str = ""
    tenant: str | None = None  # hash of the API key; None: there are no keys
    draw: Draw | None = None  # its draw of a canary's arm, if it takes part in one
    status: int = 200  # HTTP status, once it has ended; 499: the client left
    prompts: list[list[int]] = field(default_factory=list)
    params: SamplingParams = field(default_factory=SamplingParams)
    queued: bool = False
    results: dict[int, Result] = field(default_factory=dict)  # by number of the choice

    @property
    def engine(self) -> Engine:
        """The engine behind the model."""
        return self.served.engine.engine

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

    async def chunks(self, tokenize: Tokenize) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of all samples as their texts grow or, without streaming, one chunk per sample at its end.

        Closing the generator cancels what runs and frees the room in the queue. Raises ApiError and SpecbuildErrors.
        """
        structure = structure_field(self.body)
        with self.served.admission.room(self.count * self.samples, "n" if self.samples > 1 else "prompt") as ticket:
            self.prompts = await asyncio.get_running_loop().run_in_executor(self.pool, tokenize, self.engine)
            ticket.read(sum(map(len, self.prompts)))
            room = self.engine.max_model_len - max(map(len, self.prompts))
            self.params = sampling(self.body, self.served.defaults, max(room, 1), self._caller())
            with blaming(structure, "structured_outputs"):
                held = await self._compiled()
            last, self.queued = dict[int, float](), True
            async with aclosing(self._run()) as chunks:
                async for chunk in chunks:
                    ticket.started()
                    if chunk.result:
                        self.results[self.choice(chunk)] = checked(chunk.result, structure)
                    if self.observer and chunk.token_ids:
                        now = time.perf_counter()
                        before = last.get(self.choice(chunk))
                        last[self.choice(chunk)] = now
                        if before is not None:
                            self.observer.chunk(self.served.name, now - before, len(chunk.token_ids))
                    yield chunk
            del held

    def _caller(self) -> Caller:
        """Return the caller, updated for the prompt: its reasoning may have ended, markers may be special tokens."""
        reading = self.caller.reading
        if not isinstance(self.body, ChatRequest):
            return self.caller
        markers = reading.markers(bool(self.body.tools))
        known = [self.engine.tokenizer.token_id(each) for each in markers]
        shows = any(token is not None and not self.engine.decode([token]) for token in known)
        if reading.reasoning is None:
            return replace(self.caller, shows=shows)
        end = "" if self.prompt_reasons() == "ended" else reading.reasoning.end
        return replace(self.caller, shows=shows, reasoning_end=end)

    def prompt_reasons(self) -> Literal["begun", "ended", None]:
        """Return whether the prompt's end begins or ends a reasoning; see `Reasoning.in_prompt`."""
        reasoning = self.caller.reading.reasoning
        if reasoning is None or self.body.reasoning_end == "":
            return "ended" if reasoning else None
        return reasoning.in_prompt(self.engine.decode(self.prompts[0][-TAIL:], False))

    async def _compiled(self) -> Constraint | None:
        """Compile the request's constraint, if any, without delaying other requests; holding it keeps it cached."""
        outputs = self.params.structured_outputs
        return await self.grammars.constraint(self.engine, StructuredOutputs.of(outputs)) if outputs else None

    async def _run(self) -> AsyncGenerator[Chunk, None]:
        try:
            async with aclosing(self._decoded()) as chunks:
                async for chunk in chunks:
                    yield chunk
        except InputError as error:
            told = str(error).removeprefix("prompt 1: ") if self.count == 1 else str(error)
            raise ApiError(400, told, param=speculation_field(self.body) or "max_tokens") from None

    async def _decoded(self) -> AsyncGenerator[Chunk, None]:
        if self.body.stream:
            async with aclosing(self.served.engine.stream(self.prompts, self.params)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        results = await self.served.engine.generate(self.prompts, self.params)
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
