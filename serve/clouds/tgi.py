"""Translates text-generation-inference's requests into completions, and formats its texts, whole or token by token."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from specbuild.runtime import Chunk, Engine, Result, TokenLogprobs
from specbuild.serve.errors import ApiError, api_error
from specbuild.serve.openai.completions import CompletionFormat
from specbuild.serve.openai.formats import event
from specbuild.serve.openai.logprobs import LOWEST
from specbuild.serve.request.body import converted
from specbuild.serve.request.generation import Generation

from .fields import Continuation, GenerateRequest, Grammar, Parameters

PATHS = ("/generate", "/generate_stream", "/")
MAX_NEW_TOKENS = 100  # text-generation-inference's default
_SAME = ("top_k", "top_p", "repetition_penalty", "frequency_penalty", "seed", "stop", "truncate")
_NAMES = {
    **{"prompt": "inputs", "max_tokens": "parameters.max_new_tokens", "structured_outputs": "parameters.grammar"},
    "logprobs": "parameters.details",
}
_KINDS = {401: "authentication", 404: "not_found", 429: "overloaded", 503: "unhealthy"}  # error types by status


def completion_of(asked: GenerateRequest, stream: bool) -> Continuation:
    """Return the completion of a request, which is greedy unless it asks for sampling; raises ApiError."""
    own = asked.parameters or Parameters()
    for name in ("watermark", "decoder_input_details"):
        if getattr(own, name):
            raise ApiError(400, f"{name} is not supported: leave it out", param=name)
    samples = own.do_sample or own.temperature not in (None, 1.0) or own.top_k or own.top_p
    fields = {name: value for name in _SAME if (value := getattr(own, name)) is not None}
    fields |= {"prompt": asked.inputs, "stream": stream, "max_tokens": own.max_new_tokens or MAX_NEW_TOKENS}
    fields |= {"temperature": (own.temperature or 1.0) if samples else 0.0}
    fields |= {"details": own.details, "return_full_text": own.return_full_text}
    if stream or own.details:
        fields["logprobs"] = 0
    if own.grammar:
        fields["structured_outputs"] = _structure(own.grammar)
    return converted(Continuation, fields)


def asked_name(field: str) -> str:
    """Return text-generation-inference's name of a completion's field."""
    name = field.partition(".")[0]
    return _NAMES.get(name, f"parameters.{name}" if name in Parameters.__struct_fields__ else field)


def _structure(grammar: Grammar) -> dict[str, Any]:
    value = grammar.value
    if grammar.type == "json_schema":
        value = value.get("schema", "") if isinstance(value, dict) else value
    if (grammar.type == "regex") != isinstance(value, str):
        wanted = "an expression, a string" if grammar.type == "regex" else "a schema, an object"
        raise ApiError(400, f"grammar.value of type {grammar.type} is {wanted}", param="parameters.grammar.value")
    return {"regex" if grammar.type == "regex" else "json": value}


class TgiFormat(CompletionFormat):
    """Formats `generated_text` with its details, or an event for each token."""

    prefix = "tgi"

    def __init__(self, generation: Generation, *given: Any) -> None:
        super().__init__(generation, *given)
        self._text = ""
        self._result: Result | None = None

    @property
    def _asked(self) -> Continuation:
        assert isinstance(self.generation.body, Continuation)
        return self.generation.body

    def tokenize(self, engine: Engine) -> list[list[int]]:
        """See `Format.tokenize`; keeps the last `truncate` tokens of the prompt."""
        return [tokens[-(self._asked.truncate or 0) :] for tokens in super().tokenize(engine)]

    async def response(self) -> dict[str, Any]:
        """See `Format.response`."""
        details, tokens = self._asked.details, list[dict[str, Any]]()
        async with aclosing(self.generation.chunks(self.tokenize)) as chunks:
            async for chunk in chunks:
                self._add(chunk)
                if details:
                    tokens += self._tokens(chunk)
        told: dict[str, Any] = {"generated_text": self._generated()}
        return told | ({"details": self._details() | {"prefill": [], "tokens": tokens}} if details else {})

    async def events(self) -> AsyncGenerator[bytes, None]:
        """See `Format.events`. Each token's event waits for the next token, since the last event has the whole text."""
        held: dict[str, Any] | None = None
        count = 0
        async with aclosing(self.generation.chunks(self.tokenize)) as chunks:
            async for chunk in chunks:
                self._add(chunk)
                for token in self._tokens(chunk):
                    if held:
                        yield event(held)
                    count += 1
                    held = {"index": count, "token": token, "generated_text": None, "details": None}
        if held:
            details = self._details() | {"input_length": sum(map(len, self.generation.prompts))}
            yield event(held | {"generated_text": self._generated(), "details": details})

    def fault(self, error: Exception) -> bytes:
        """See `Format.fault`."""
        return event(error_body(api_error(error)))

    def _add(self, chunk: Chunk) -> None:
        self._text += chunk.text
        self._result = chunk.result or self._result

    def _tokens(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """Yield a chunk's tokens; their texts add up to the chunk's text, even where a token's own text differs."""
        tokenizer, left = self.generation.engine.tokenizer, chunk.text
        logprobs: Sequence[TokenLogprobs | None] = chunk.logprobs or [None] * len(chunk.token_ids)
        for place, (token, each) in enumerate(zip(chunk.token_ids, logprobs, strict=True), 1):
            own = tokenizer.token_text(token)
            text = own if left.startswith(own) else ""
            text = left if place == len(chunk.token_ids) else text
            left = left[len(text) :]
            logprob = max(each.logprob, LOWEST) if each else None
            yield {"id": token, "text": text, "logprob": logprob, "special": tokenizer.is_special(token)}

    def _generated(self) -> str:
        return f"{self._asked.prompt if self._asked.return_full_text else ''}{self._text}"

    def _details(self) -> dict[str, Any]:
        result = self._result
        assert result is not None
        stopped = "stop_sequence" if result.stop_reason else "eos_token"
        reason = stopped if result.finish_reason == "stop" else "length"
        return {"finish_reason": reason, "generated_tokens": len(result.token_ids), "seed": self._asked.seed}


def error_body(error: ApiError) -> dict[str, Any]:
    """Return text-generation-inference's error object."""
    kind = _KINDS.get(error.status, "validation" if error.status < 500 else "generation")
    return {"error": error.message, "error_type": kind}
