"""/v1/responses: formats a turn as OpenAI's response object, whole or streamed."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec

from specbuild.runtime import Chunk
from specbuild.serve.errors import api_error
from specbuild.serve.openai.chat import ChatFormat
from specbuild.serve.openai.responses import metrics
from specbuild.serve.request.generation import Generation

from .conversation import items_of
from .fields import ResponsesRequest
from .items import Event, Output
from .response_registry import Kept

SAMPLED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
# Fields that a response begins without, and those that no request changes.
UNSET = "error incomplete_details completed_at reasoning max_tool_calls safety_identifier prompt_cache_key".split()
FIXED = {"service_tier": "default", "top_logprobs": 0, "truncation": "disabled"}


class ResponseFormats:
    """Builds the `ResponseFormat` of a request, see `Formats`; `made` contains it once it is built."""

    prefix, operation = "resp", "chat"

    def __init__(self, asked: ResponsesRequest, kept: Kept) -> None:
        self._asked, self._kept, self.made = asked, kept, list[ResponseFormat]()

    def __call__(self, generation: Generation, *given: Any) -> ResponseFormat:
        """Return the format of a generation."""
        self.made.append(ResponseFormat(self._asked, self._kept, generation, *given))
        return self.made[0]


class ResponseFormat(ChatFormat):
    """Formats `response` objects and OpenAI's stream events; stores the response at its end unless `store` is false."""

    def __init__(self, asked: ResponsesRequest, kept: Kept, generation: Generation, *given: Any) -> None:
        super().__init__(generation, *given)
        self._asked, self._kept, self._output = asked, kept, Output()
        self._sequence, self._stop, self.number = 0, asyncio.Event(), f"resp_{secrets.token_hex(16)}"
        self.body = self._begun_body()

    def cancel(self) -> None:
        """Stop decoding; the response is then stored as cancelled."""
        self._stop.set()

    async def response(self) -> dict[str, Any]:
        """See `Format.response`."""
        async for _ in self._told():
            pass
        if self.failed:
            raise self.failed
        return self.body

    async def events(self) -> AsyncGenerator[bytes, None]:
        """See `Format.events`."""
        async with aclosing(self._told()) as events:
            async for event in events:
                yield self._sent(event)

    def fault(self, error: Exception) -> bytes:
        """See `Format.fault`."""
        said = api_error(error)
        return self._sent({"type": "error", "code": said.code, "message": said.message, "param": said.param})

    def _sent(self, event: Event) -> bytes:
        numbered = {"type": event["type"], "sequence_number": self._sequence, **event}
        self._sequence += 1
        return f"event: {event['type']}\ndata: ".encode() + msgspec.json.encode(numbered) + b"\n\n"

    def _events(self, chunk: Chunk) -> Iterator[Event]:
        """Yield the events of what a chunk adds to the output."""
        for piece in self.read(0, chunk):
            yield from self._output.add(piece)

    async def _told(self) -> AsyncGenerator[Event, None]:
        """Yield all events without their numbers; raise an error that occurs before the first event."""
        begun, ended = False, "cancelled"
        with self._kept.running(self.generation.tenant, self):
            try:
                async with aclosing(self._chunks()) as chunks:
                    async for chunk in chunks:
                        if not begun:
                            self.body |= self._sampled()
                            yield {"type": "response.created", "response": self.body}
                            yield {"type": "response.in_progress", "response": self.body}
                        begun = True
                        for event in self._events(chunk):
                            yield event
                        if chunk.result:
                            ended = "completed" if chunk.result.finish_reason == "stop" else "incomplete"
            except Exception as error:
                if not begun and not (self._asked.background and self.generation.queued):
                    raise
                self.failed, ended = error, "failed"
            for event in self._output.close("completed" if ended == "completed" else "incomplete"):
                yield event
            self._end_body(ended)
            if self._asked.store is not False:
                items = msgspec.to_builtins(items_of(self._asked))
                try:
                    await self._kept.put(self.generation.tenant, self.number, {"input": items, "response": self.body})
                except Exception as error:
                    self.failed, ended = error, "failed"
                    self._end_body(ended)
        yield {"type": f"response.{ended if ended != 'cancelled' else 'incomplete'}", "response": self.body}

    async def _chunks(self) -> AsyncGenerator[Chunk, None]:
        """Yield the generation's chunks until it ends or is cancelled."""
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            async with aclosing(self.generation.chunks(self.tokenize)) as chunks:
                while True:
                    coming = asyncio.ensure_future(anext(chunks))
                    try:
                        await asyncio.wait({coming, stopping}, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        if not coming.done():
                            coming.cancel()
                            await asyncio.gather(coming, return_exceptions=True)
                    if coming.cancelled():
                        return
                    try:
                        chunk = coming.result()
                    except StopAsyncIteration:
                        return
                    yield chunk
        finally:
            stopping.cancel()

    def _begun_body(self) -> dict[str, Any]:
        asked = self._asked
        return {
            **{"id": self.number, "object": "response", "created_at": int(time.time()), "status": "in_progress"},
            **{"model": self.generation.served.name, "output": [], "usage": None, "instructions": asked.instructions},
            **dict.fromkeys(UNSET) | FIXED | self._sampled(),
            **{name: getattr(asked, name) for name in ("max_output_tokens", "previous_response_id", "user")},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "tool_choice": msgspec.to_builtins(asked.tool_choice) or "auto",
            "tools": [msgspec.structs.asdict(each) for each in asked.tools or ()],
            "text": msgspec.to_builtins(asked.text) or {"format": {"type": "text"}},
            "metadata": asked.metadata or {},
            **{"background": bool(asked.background), "store": asked.store is not False},
        }

    def _sampled(self) -> dict[str, Any]:
        """Return how tokens are chosen: as was asked, else by the model's defaults once the prompt is read."""
        asked, used = self._asked, self.generation.params
        return {name: getattr(used if getattr(asked, name) is None else asked, name) for name in SAMPLED}

    def _end_body(self, status: str) -> None:
        told: dict[str, Any] = {"status": status, "output": self._output.items, "usage": self._used()}
        told["completed_at"] = int(time.time()) if status == "completed" else None
        result = self.generation.results.get(0)
        if status == "incomplete" and result:
            late = result.finish_reason == "deadline"
            told["incomplete_details"] = {"reason": "deadline" if late else "max_output_tokens"}
        elif self.failed:
            said = api_error(self.failed)
            told["error"] = {"code": said.code or "server_error", "message": said.message}
        if result and (own := metrics([result], self._metrics)):
            told["metrics"] = own
        self.body = {**self.body, **told}

    def _used(self) -> dict[str, Any] | None:
        """Return the token usage; None before there is a result."""
        generation, result = self.generation, self.generation.results.get(0)
        if not result:
            return None
        prompt, emitted = sum(map(len, generation.prompts)), result.token_ids
        reasoned = self.reasoning_tokens(0)
        cached = result.metrics.num_cached_tokens if result.metrics else 0
        return {
            **{"input_tokens": prompt, "output_tokens": len(emitted), "total_tokens": prompt + len(emitted)},
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": reasoned},
        }
