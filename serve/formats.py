"""A request's chunks as one response, or as server-sent events: what completions and chats have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from specbuild.runtime import Chunk, Engine, Result

from .errors import api_error
from .generation import Generation
from .responses import SpecMetrics, finish_reason, metrics, usage

DONE = b"data: [DONE]\n\n"


def event(body: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class Format(ABC):
    """How a kind of request is answered."""

    whole: str  # OpenAI's name of a response, and of a chunk of one
    part: str
    prefix: str  # of an id
    operation: str  # OpenTelemetry's name
    begins = False  # whether a sample's first chunk shows something even without text

    def __init__(self, generation: Generation, request_id: str, spec_metrics: SpecMetrics, token_ids: bool) -> None:
        """`token_ids`: whether the server sends token ids to those who say nothing about it."""
        self.generation, self._metrics = generation, spec_metrics
        asked = generation.body.return_token_ids
        self.token_ids = token_ids if asked is None else asked
        self.head = {"id": request_id, "created": int(time.time()), "model": generation.served.name}
        self.failed: Exception | None = None  # what went wrong after the first event
        self._emitted = 0
        self._begun = set[int]()

    @abstractmethod
    def tokenize(self, engine: Engine) -> list[list[int]]:
        """The prompts' tokens; in a thread."""

    @abstractmethod
    def choice(self, number: int, chunk: Chunk) -> dict[str, Any]:
        """What a response has of a sample that ended, by this kind's fields."""

    @abstractmethod
    def delta(self, number: int, chunk: Chunk, first: bool) -> dict[str, Any]:
        """What an event has of a chunk, by this kind's fields; `first`: of its sample."""

    async def response(self) -> dict[str, Any]:
        """The whole response; raises what the generation raises."""
        choices = dict[int, dict[str, Any]]()
        async for chunk in self.generation.chunks(self.tokenize):
            number = self.generation.choice(chunk)
            choices[number] = {"index": number, **self.choice(number, chunk), **self._end(number, chunk)}
        results = [self.generation.results[number] for number in sorted(choices)]
        body = {**self.head, "object": self.whole, "choices": [choices[number] for number in sorted(choices)]}
        return {**body, **self._summary(results)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Events of all chunks, of the usage if asked, and of the end.

        What goes wrong before the first is raised; what goes wrong later is an event.
        """
        options = self.generation.body.stream_options
        wanted, always = (options.include_usage, options.continuous_usage_stats) if options else (False, False)
        head = {**self.head, "object": self.part}
        begun = False
        try:
            async for chunk in self.generation.chunks(self.tokenize):
                self._emitted += len(chunk.token_ids)
                choice = self._part(chunk)
                if choice is None:
                    continue
                told: dict[str, Any] = {**head, "choices": [choice]}
                if wanted:
                    told["usage"] = self._usage() if always else None
                yield event(told)
                begun = True
            if wanted:
                results = [result for _, result in sorted(self.generation.results.items())]
                yield event({**head, "choices": [], **self._summary(results)})
        except Exception as error:
            if not begun:
                raise
            self.failed = error
            yield event(api_error(error).body())
        yield DONE

    def _part(self, chunk: Chunk) -> dict[str, Any] | None:
        number = self.generation.choice(chunk)
        sources = self.generation.body.return_token_sources
        first, ids = number not in self._begun, (self.token_ids or sources) and chunk.token_ids
        if not (chunk.text or chunk.logprobs or chunk.result or ids or (first and self.begins)):
            return None
        self._begun.add(number)
        return {"index": number, **self.delta(number, chunk, first), **self._end(number, chunk)}

    def _end(self, number: int, chunk: Chunk) -> dict[str, Any]:
        """What a sample has at its end, and its token ids."""
        generation, result = self.generation, chunk.result
        told: dict[str, Any] = {"finish_reason": None}
        if self.token_ids:
            told["token_ids"] = chunk.token_ids
        if generation.body.return_token_sources:
            told["token_sources"] = self._sources(chunk)
        if result is None:
            return told
        told["finish_reason"], told["stop_reason"] = finish_reason(result)
        if self.token_ids:
            told["prompt_token_ids"] = generation.prompts[chunk.index]
        if own := metrics([result], self._metrics):
            told["metrics"] = own
        if generation.body.receipt:
            prompt = generation.prompts[chunk.index]
            told["receipt"] = generation.engine.receipt(prompt, generation.params, result).to_dict()
        return told

    def _sources(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Each token's text, and whether a drafter had proposed it."""
        text = self.generation.engine.tokenizer.token_text
        tokens = zip(chunk.token_ids, chunk.drafted, strict=True)
        return [{"text": text(token), "drafted": drafted} for token, drafted in tokens]

    def _usage(self) -> Any:
        return usage(sum(map(len, self.generation.prompts)), self._emitted)

    def _summary(self, results: list[Result]) -> dict[str, Any]:
        """Usage and metrics of all samples."""
        emitted = sum(len(result.token_ids) for result in results)
        firsts = results[:: self.generation.samples]
        cached = sum(each.metrics.num_cached_tokens for each in firsts if each.metrics)
        told: dict[str, Any] = {"usage": usage(sum(map(len, self.generation.prompts)), emitted, cached)}
        if own := metrics(results, self._metrics):
            told["metrics"] = own
        return told
