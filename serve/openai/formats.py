"""Formats a request's chunks as one response or as server-sent events; shared by completions and chats."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from specbuild.runtime import Chunk, Engine, Result
from specbuild.serve.errors import api_error
from specbuild.serve.request.generation import Generation

from .responses import SpecMetrics, finish_reason, metrics, usage

DONE = b"data: [DONE]\n\n"


def event(body: Any) -> bytes:
    """Return a server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class Format(ABC):
    """Answers one kind of request."""

    whole: str  # OpenAI's name of a response
    part: str  # OpenAI's name of a response's chunk
    prefix: str  # prefix of a response's id
    operation: str  # OpenTelemetry's name of the operation
    begins = False  # whether a sample's first chunk is sent even without text

    def __init__(self, generation: Generation, request_id: str, spec_metrics: SpecMetrics, token_ids: bool) -> None:
        """Format a generation.

        Args:
            generation: The generation that is answered.
            request_id: Id of the response.
            spec_metrics: How much the response says about its speculation.
            token_ids: Whether the response has token ids if the request does not say.
        """
        self.generation, self._metrics = generation, spec_metrics
        asked = generation.body.return_token_ids
        self.token_ids = token_ids if asked is None else asked
        fingerprint = f"fp_{generation.served.manifest.digest[:12]}"
        self.head = {"id": request_id, "created": int(time.time()), "model": generation.served.name}
        self.head["system_fingerprint"] = fingerprint
        self.failed: Exception | None = None  # the error that ended a stream which had begun
        self._emitted = 0
        self._begun = set[int]()

    @abstractmethod
    def tokenize(self, engine: Engine) -> list[list[int]]:
        """Return the prompts' token ids; runs in a thread."""

    @abstractmethod
    def choice(self, number: int, chunk: Chunk) -> dict[str, Any]:
        """Return a whole response's fields for a sample that has ended, except those that all formats share."""

    @abstractmethod
    def delta(self, number: int, chunk: Chunk, first: bool) -> dict[str, Any]:
        """Return a stream event's fields for a chunk, except those that all formats share.

        `first`: whether the chunk is its sample's first.
        """

    def reasoning_tokens(self, number: int) -> int | None:
        """Return how many tokens of a sample that has ended are its reasoning; None for a format that tells none."""
        return None

    async def response(self) -> dict[str, Any]:
        """Return the whole response; raises the generation's errors."""
        choices = dict[int, dict[str, Any]]()
        async with aclosing(self.generation.chunks(self.tokenize)) as chunks:
            async for chunk in chunks:
                number = self.generation.choice(chunk)
                choices[number] = {"index": number, **self.choice(number, chunk), **self._end(number, chunk)}
        results = [self.generation.results[number] for number in sorted(choices)]
        body = {**self.head, "object": self.whole, "choices": [choices[number] for number in sorted(choices)]}
        return {**body, **self._summary(results)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of all chunks, of the usage if asked for, and of the end; raises the generation's errors."""
        options = self.generation.body.stream_options
        wanted, always = (options.include_usage, options.continuous_usage_stats) if options else (False, False)
        head = {**self.head, "object": self.part}
        async with aclosing(self.generation.chunks(self.tokenize)) as chunks:
            async for chunk in chunks:
                self._emitted += len(chunk.token_ids)
                choice = self._part(chunk)
                if choice is None:
                    continue
                told: dict[str, Any] = {**head, "choices": [choice]}
                if wanted:
                    told["usage"] = self._usage() if always else None
                yield event(told)
        if wanted:
            results = [result for _, result in sorted(self.generation.results.items())]
            yield event({**head, "choices": [], **self._summary(results)})
        yield DONE

    def fault(self, error: Exception) -> bytes:
        """Return what ends a stream whose `events` have raised an error."""
        return event(api_error(error).body()) + DONE

    def _part(self, chunk: Chunk) -> dict[str, Any] | None:
        number = self.generation.choice(chunk)
        sources = self.generation.body.return_token_sources
        first, ids = number not in self._begun, (self.token_ids or sources) and chunk.token_ids
        if not (chunk.text or chunk.logprobs or chunk.result or ids or (first and self.begins)):
            return None
        self._begun.add(number)
        return {"index": number, **self.delta(number, chunk, first), **self._end(number, chunk)}

    def _end(self, number: int, chunk: Chunk) -> dict[str, Any]:
        """Return a sample's token ids and, with its last chunk, its finish reason, metrics and receipt."""
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
        """Return the usage and metrics of all samples."""
        emitted = sum(len(result.token_ids) for result in results)
        firsts = results[:: self.generation.samples]
        cached = sum(each.metrics.num_cached_tokens for each in firsts if each.metrics)
        reasoned = [self.reasoning_tokens(number) for number in self.generation.results]
        whole = usage(sum(map(len, self.generation.prompts)), emitted, cached, results)
        if counts := [each for each in reasoned if each is not None]:
            whole.setdefault("completion_tokens_details", {})["reasoning_tokens"] = sum(counts)
        told: dict[str, Any] = {"usage": whole}
        if own := metrics(results, self._metrics):
            told["metrics"] = own
        return told
