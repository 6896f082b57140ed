"""One request's way through an engine: room, tokens, chunks, and an end whatever the client does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from specbuild.runtime import Chunk, Constraint, Engine, Result, SamplingParams, StructuredOutputs
from specbuild.serve.turns.reasoning import TAIL

from .arms import Draw
from .errors import ApiError, api_error
from .fields import ChatRequest, Sampling
from .models import ServedModel
from .parameters import Caller, sampling

Value = TypeVar("Value")
Tokenize = Callable[[Engine], list[list[int]]]


class Observes(Protocol):
    """What is told of chunks; see `Metrics.chunk`."""

    def chunk(self, model: str, gap_seconds: float, tokens: int) -> None:
        """A sample emitted tokens so long after its last chunk."""
        ...


@dataclass(slots=True)
class Generation:
    """A request whose prompts become texts. `prompts`, `params`: known once it is prepared. `results`: what ended."""

    served: ServedModel
    body: Sampling
    caller: Caller
    count: int  # prompts
    pool: ThreadPoolExecutor | None  # where it is tokenized; None: where it may wait for long
    observer: Observes | None = None
    compiling: ThreadPoolExecutor | None = None  # where structured outputs are compiled; None: somewhere
    request_id: str = ""
    tenant: str | None = None  # whose API key it came with, by its hash; None: no keys
    draw: Draw | None = None  # its arm of a canary, where it has one
    status: int = 200  # of its answer, once it has ended; 499: the client left
    prompts: list[list[int]] = field(default_factory=list)
    params: SamplingParams = field(default_factory=SamplingParams)
    results: dict[int, Result] = field(default_factory=dict)  # by choice

    @property
    def engine(self) -> Engine:
        """The engine behind the model."""
        return self.served.engine.engine

    @property
    def arm(self) -> str | None:
        """Its arm of a canary by name; None: it is in none."""
        return None if self.draw is None else "candidate" if self.draw.candidate else "baseline"

    @property
    def samples(self) -> int:
        """Of each prompt."""
        return self.body.n or 1

    def choice(self, chunk: Chunk) -> int:
        """The number of a chunk's choice: prompt by prompt, sample by sample."""
        return chunk.index * self.samples + chunk.sample

    async def chunks(self, tokenize: Tokenize) -> AsyncGenerator[Chunk, None]:
        """Chunks of all samples as their texts grow, or where nobody streams each sample's last one alone.

        Leaving it cancels what runs. Raises ApiError and SpecbuildErrors; the room is free again afterwards.
        """
        with self.served.admission.room(self.count * self.samples) as ticket:
            self.prompts = await asyncio.get_running_loop().run_in_executor(self.pool, tokenize, self.engine)
            ticket.read(sum(map(len, self.prompts)))
            room = self.engine.max_model_len - max(map(len, self.prompts))
            self.params = sampling(self.body, self.served.defaults, max(room, 1), self._caller())
            held = await self._compiled()
            last = dict[int, float]()
            async with aclosing(self._run()) as chunks:
                async for chunk in chunks:
                    ticket.started()
                    if chunk.result:
                        self.results[self.choice(chunk)] = checked(chunk.result)
                    if self.observer and chunk.token_ids:
                        now = time.perf_counter()
                        before = last.get(self.choice(chunk))
                        last[self.choice(chunk)] = now
                        if before is not None:
                            self.observer.chunk(self.served.name, now - before, len(chunk.token_ids))
                    yield chunk
            del held

    def _caller(self) -> Caller:
        """Who asks, knowing what the prompt has done of a reasoning already."""
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
        """What the prompt's end has done of a reasoning; see `Reasoning.in_prompt`."""
        reasoning = self.caller.reading.reasoning
        if reasoning is None or self.body.reasoning_end == "":
            return "ended" if reasoning else None
        return reasoning.in_prompt(self.engine.decode(self.prompts[0][-TAIL:], False))

    async def _compiled(self) -> Constraint | None:
        """What the texts are held to, compiled where it keeps nobody else waiting, as long as it is kept."""
        outputs = self.params.structured_outputs
        if outputs is None:
            return None
        compiling = partial(self.engine.constraint, StructuredOutputs.of(outputs))
        return await asyncio.get_running_loop().run_in_executor(self.compiling, compiling)

    async def _run(self) -> AsyncGenerator[Chunk, None]:
        if self.body.stream:
            async with aclosing(self.served.engine.stream(self.prompts, self.params)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        results = await self.served.engine.generate(self.prompts, self.params)
        for number, result in enumerate(results):
            index, sample = divmod(number, self.samples)
            yield Chunk(index, sample, result.text, result.token_ids, result.logprobs, result, result.drafted)


class Watcher(Protocol):
    """Is told of ended requests on the event loop's thread: what takes longer than microseconds, `run` does."""

    def ended(self, generation: Generation) -> None:
        """A request has ended, however: `generation.results` has the samples that did. Must not raise."""
        ...

    async def run(self) -> None:
        """Work beside the requests until it is cancelled; one that has nothing to do may return."""
        ...


def checked(result: Result) -> Result:
    """A result that is a text; raises ApiError for what failed, was cut off, or had no time for a single token."""
    if result.finish_reason == "error":
        raise api_error(result.error) if result.error else ApiError(500, "decoding failed")
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
    """What `work` returns or raises; it is cancelled, and ClientGoneError raised, when the client leaves."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        await _cancel(working, leaving)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have cleaned up; what they raise then is nobody's."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events; when the client leaves, what makes them is closed at once."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def drain(self) -> None:
        """Let everything happen that the events say, though nobody reads them."""
        async with aclosing(self._events) as events:
            async for _ in events:
                pass

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send every event; see Starlette's `Response`."""
        with suppress(ClientGoneError):
            await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)  # so that they have begun, and end, whenever the client leaves
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
