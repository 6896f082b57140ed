"""Formats a request's chunks as one response or as server-sent events: what all APIs share, and OpenAI's choices."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec

from specbuild.runtime import Chunk, Result
from specbuild.serve.errors import api_error
from specbuild.serve.options import ServeOptions
from specbuild.serve.request.generation import Generation

from .responses import finish_reason, metrics, usage

DONE = b"data: [DONE]\n\n"


def event(body: Any) -> bytes:
    """Return a server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def named_event(body: dict[str, Any]) -> bytes:
    """Return a server-sent event with the name that its type is."""
    return f"event: {body['type']}\n".encode() + event(body)


class Format(ABC):
    """Formats one request. `failed`: the error that ended a stream which had begun."""

    prefix: str  # prefix of a response's id
    operation: str  # OpenTelemetry's name of the operation
    background = False  # whether it goes on without a client

    def __init__(self, generation: Generation, options: ServeOptions) -> None:
        """Format a generation.

        Args:
            generation: The generation that is answered.
            options: The server's options: how much a response says of speculation, and whether it has token ids.
        """
        self.generation, self._how = generation, options.spec_metrics
        self.head = {
            "id": f"{self.prefix}-{generation.request_id}",
            "created": int(time.time()),
            "model": generation.served.name,
            "system_fingerprint": f"fp_{generation.served.manifest.digest[:12]}",
        }
        self.failed: Exception | None = None

    @abstractmethod
    def part(self, chunk: Chunk) -> Iterator[bytes]:
        """Yield a chunk's events."""

    @abstractmethod
    def last(self) -> Iterator[bytes]:
        """Yield the events that end a stream, which has `failed` or is whole."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Return the whole response, of the chunks that were added."""

    def add(self, chunk: Chunk) -> None:
        """Add a chunk to the whole response."""
        for _ in self.part(chunk):
            pass

    def follow(self, chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[Chunk, None]:
        """Return the chunks that are formatted: all, unless a response can be cancelled."""
        return chunks

    async def finish(self) -> None:
        """Do what comes between the last chunk, or an error, and the last events."""
        return

    def close(self) -> None:
        """End the request, whichever way it went."""
        return

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(map(len, self.generation.prompts))

    def metrics(self, results: list[Result]) -> dict[str, Any]:
        """Return the field `metrics` of samples, if there is anything to say."""
        own = metrics(results, self._how)
        return {"metrics": own} if own else {}


class ChoicesFormat(Format):
    """Formats OpenAI's responses, which have a choice for each sample."""

    whole_object: str  # OpenAI's name of a response
    part_object: str  # OpenAI's name of a response's chunk
    begins = False  # whether a sample's first chunk is sent even without text

    def __init__(self, generation: Generation, options: ServeOptions) -> None:
        super().__init__(generation, options)
        asked = generation.body.return_token_ids
        self.token_ids = options.return_token_ids if asked is None else asked
        self._emitted, self._begun = 0, set[int]()
        self._choices = dict[int, dict[str, Any]]()  # of a whole response

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

    def add(self, chunk: Chunk) -> None:
        """See `Format.add`."""
        number = self.generation.choice(chunk)
        self._choices[number] = {"index": number, **self.choice(number, chunk), **self._end(number, chunk)}

    def whole(self) -> dict[str, Any]:
        """See `Format.whole`."""
        choices = [each for _, each in sorted(self._choices.items())]
        return {**self.head, "object": self.whole_object, "choices": choices, **self._summary()}

    def part(self, chunk: Chunk) -> Iterator[bytes]:
        """See `Format.part`."""
        self._emitted += len(chunk.token_ids)
        choice, options = self._part(chunk), self.generation.body.stream_options
        if choice is None:
            return
        told: dict[str, Any] = {**self.head, "object": self.part_object, "choices": [choice]}
        if options and options.include_usage:
            always = options.continuous_usage_stats
            told["usage"] = usage(self.prompt_tokens, self._emitted) if always else None
        yield event(told)

    def last(self) -> Iterator[bytes]:
        """See `Format.last`."""
        options = self.generation.body.stream_options
        if self.failed:
            yield event(api_error(self.failed).body()) + DONE
            return
        if options and options.include_usage:
            yield event({**self.head, "object": self.part_object, "choices": [], **self._summary()})
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
        prompt = generation.prompts[chunk.index]
        if self.token_ids:
            told["prompt_token_ids"] = prompt
        if generation.body.receipt:
            told["receipt"] = generation.engine.receipt(prompt, generation.params, result).to_dict()
        return told | self.metrics([result])

    def _sources(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Each token's text, and whether a drafter had proposed it."""
        text = self.generation.engine.tokenizer.token_text
        tokens = zip(chunk.token_ids, chunk.drafted, strict=True)
        return [{"text": text(token), "drafted": drafted} for token, drafted in tokens]

    def _summary(self) -> dict[str, Any]:
        """Return the usage and metrics of all samples."""
        results = [result for _, result in sorted(self.generation.results.items())]
        emitted = sum(len(result.token_ids) for result in results)
        firsts = results[:: self.generation.samples]
        cached = sum(each.metrics.num_cached_tokens for each in firsts if each.metrics)
        reasoned = [self.reasoning_tokens(number) for number in self.generation.results]
        whole = usage(self.prompt_tokens, emitted, cached, results)
        if counts := [each for each in reasoned if each is not None]:
            whole.setdefault("completion_tokens_details", {})["reasoning_tokens"] = sum(counts)
        return {"usage": whole, **self.metrics(results)}
