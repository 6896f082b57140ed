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
from specbuild.serve.openai.formats import named_event
from specbuild.serve.options import ServeOptions
from specbuild.serve.request.generation import Generation, cancelled

from .conversation import items_of
from .fields import ResponsesRequest
from .items import Event, Output
from .response_registry import ResponseRegistry

SAMPLED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
# Fields that a response begins without, and those that no request changes.
UNSET = "error incomplete_details completed_at reasoning max_tool_calls safety_identifier prompt_cache_key".split()
FIXED = {"service_tier": "default", "top_logprobs": 0, "truncation": "disabled"}


class ResponseFormat(ChatFormat):
    """Formats `response` objects and OpenAI's stream events; stores the response at its end unless `store` is false."""

    prefix = "resp"

    def __init__(
        self, generation: Generation, options: ServeOptions, asked: ResponsesRequest, registry: ResponseRegistry
    ) -> None:
        super().__init__(generation, options)
        self._asked, self._registry, self._output = asked, registry, Output()
        self._sequence, self._stop, self.number = 0, asyncio.Event(), f"resp_{secrets.token_hex(16)}"
        self._started, self._closing = False, list[Event]()
        self.background = bool(asked.background)
        self.body = self._begun_body()
        registry.begin(generation.tenant, self)

    def cancel(self) -> None:
        """Stop decoding; the response is then stored as cancelled."""
        self._stop.set()

    def part(self, chunk: Chunk) -> Iterator[bytes]:
        """See `Format.part`."""
        return map(self._sent, self._events(chunk))

    async def finish(self) -> None:
        """See `Format.finish`; stores the response, but not one that failed while its client waited for it to begin."""
        if self.failed and not self._started and not self.background:
            return
        self._closing = list(self._output.close("completed" if self._status() == "completed" else "incomplete"))
        self._end_body()
        if self._asked.store is False:
            return
        items = msgspec.to_builtins(items_of(self._asked))
        try:
            await self._registry.put(self.generation.tenant, self.number, {"input": items, "response": self.body})
        except Exception as error:
            self.failed = error
            self._end_body()

    def last(self) -> Iterator[bytes]:
        """See `Format.last`."""
        if self.failed and not self._started:
            said = api_error(self.failed)
            yield self._sent({"type": "error", "code": said.code, "message": said.message, "param": said.param})
            return
        status = self._status()
        ended = "incomplete" if status == "cancelled" else status
        yield from map(self._sent, [*self._closing, {"type": f"response.{ended}", "response": self.body}])

    def whole(self) -> dict[str, Any]:
        """See `Format.whole`."""
        return self.body

    def close(self) -> None:
        """See `Format.close`."""
        self._registry.end(self.generation.tenant, self)

    def add(self, chunk: Chunk) -> None:
        """See `Format.add`."""
        for _ in self._events(chunk):
            pass

    async def follow(self, chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[Chunk, None]:
        """See `Format.follow`; ends when the response is cancelled."""
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            async with aclosing(chunks):
                while True:
                    coming = asyncio.ensure_future(anext(chunks, None))
                    try:
                        await asyncio.wait({coming, stopping}, return_when=asyncio.FIRST_COMPLETED)
                        chunk = coming.result() if coming.done() else None
                    finally:
                        await cancelled(coming)
                    if chunk is None:
                        return
                    yield chunk
        finally:
            stopping.cancel()

    def _sent(self, event: Event) -> bytes:
        numbered = {"type": event["type"], "sequence_number": self._sequence, **event}
        self._sequence += 1
        return named_event(numbered)

    def _events(self, chunk: Chunk) -> Iterator[Event]:
        """Yield the events of what a chunk adds to the output."""
        if not self._started:
            self._started = True
            self.body |= self._sampled()
            yield {"type": "response.created", "response": self.body}
            yield {"type": "response.in_progress", "response": self.body}
        for piece in self.read(0, chunk):
            yield from self._output.add(piece)

    def _status(self) -> str:
        """Return how the response ended."""
        result = self.generation.results.get(0)
        if self.failed:
            return "failed"
        if result is None:
            return "cancelled"
        return "completed" if result.finish_reason == "stop" else "incomplete"

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

    def _end_body(self) -> None:
        status = self._status()
        told: dict[str, Any] = {"status": status, "output": self._output.items, "usage": self._used()}
        told["completed_at"] = int(time.time()) if status == "completed" else None
        result = self.generation.results.get(0)
        if status == "incomplete" and result:
            late = result.finish_reason == "deadline"
            told["incomplete_details"] = {"reason": "deadline" if late else "max_output_tokens"}
        elif self.failed:
            said = api_error(self.failed)
            told["error"] = {"code": said.code or "server_error", "message": said.message}
        self.body = {**self.body, **told, **(self.metrics([result]) if result else {})}

    def _used(self) -> dict[str, Any] | None:
        """Return the token usage; None before there is a result."""
        result = self.generation.results.get(0)
        if not result:
            return None
        prompt, emitted = self.prompt_tokens, result.token_ids
        reasoned = self.reasoning_tokens(0)
        cached = result.metrics.num_cached_tokens if result.metrics else 0
        return {
            **{"input_tokens": prompt, "output_tokens": len(emitted), "total_tokens": prompt + len(emitted)},
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": reasoned},
        }
