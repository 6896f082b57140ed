"""Translates text-generation-inference's requests into completions, and formats its texts, whole or token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specbuild.runtime import Chunk, TokenLogprobs
from specbuild.serve.errors import ApiError, api_error
from specbuild.serve.openai.formats import Format, event
from specbuild.serve.openai.logprobs import LOWEST
from specbuild.serve.options import ServeOptions
from specbuild.serve.request.body import converted
from specbuild.serve.request.generation import Generation

from .fields import Continuation, GenerateRequest, Grammar, Parameters

PATHS = ("/generate", "/generate_stream", "/")
MAX_NEW_TOKENS = 100  # text-generation-inference's default
_SAME = (  # fields with the same name in a completion
    *("top_k", "top_p", "repetition_penalty", "frequency_penalty", "seed", "stop", "details", "return_full_text"),
)
_NAMES = {
    **{"prompt": "inputs", "max_tokens": "parameters.max_new_tokens", "structured_outputs": "parameters.grammar"},
    "logprobs": "parameters.details",
    "truncate_prompt_tokens": "parameters.truncate",
}
_KINDS = {401: "authentication", 404: "not_found", 429: "overloaded", 503: "unhealthy"}  # error types by status


def completion_of(asked: GenerateRequest, stream: bool) -> Continuation:
    """Return the completion of a request, which is greedy unless it asks for sampling; raises ApiError."""
    own = asked.parameters or Parameters()
    for name in ("watermark", "decoder_input_details"):
        if getattr(own, name):
            raise ApiError(400, f"{name} is not supported: leave it out", param=name)
    samples = own.do_sample or own.temperature not in (None, 1.0) or own.top_k or own.top_p
    return converted(
        Continuation,
        {name: getattr(own, name) for name in _SAME}
        | {
            "prompt": asked.inputs,
            "stream": stream,
            "max_tokens": own.max_new_tokens or MAX_NEW_TOKENS,
            "temperature": (own.temperature or 1.0) if samples else 0.0,
            "truncate_prompt_tokens": own.truncate,
            "logprobs": 0 if stream or own.details else None,
            "structured_outputs": own.grammar and _structure(own.grammar),
        },
    )


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


class TgiFormat(Format):
    """Formats `generated_text` with its details, or an event for each token."""

    prefix, operation = "tgi", "text_completion"

    def __init__(self, generation: Generation, options: ServeOptions) -> None:
        super().__init__(generation, options)
        assert isinstance(generation.body, Continuation)
        self._asked, self._text, self._all = generation.body, "", list[dict[str, Any]]()

    def add(self, chunk: Chunk) -> None:
        """See `Format.add`."""
        self._all += self._tokens(chunk)

    def whole(self) -> dict[str, Any]:
        """See `Format.whole`."""
        details = self._details() | {"prefill": [], "tokens": self._all}
        return {"generated_text": self._generated(), **({"details": details} if self._asked.details else {})}

    def part(self, chunk: Chunk) -> Iterator[bytes]:
        """See `Format.part`; the latest token waits for `last`, since the last event has the whole text."""
        for token in self._tokens(chunk):
            if self._all:
                yield event(self._event())
            self._all.append(token)

    def last(self) -> Iterator[bytes]:
        """See `Format.last`."""
        if self.failed:
            yield event(error_body(api_error(self.failed)))
        else:
            details = self._details() | {"input_length": self.prompt_tokens}
            yield event(self._event() | {"generated_text": self._generated(), "details": details})

    def _event(self) -> dict[str, Any]:
        return {"index": len(self._all), "token": self._all[-1], "generated_text": None, "details": None}

    def _tokens(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """Yield a chunk's tokens; their texts add up to the chunk's text, even where a token's own text differs."""
        self._text += chunk.text
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
        result = self.generation.results[0]
        stopped = "stop_sequence" if result.stop_reason else "eos_token"
        reason = stopped if result.finish_reason == "stop" else "length"
        return {"finish_reason": reason, "generated_tokens": len(result.token_ids), "seed": self._asked.seed}


def error_body(error: ApiError) -> dict[str, Any]:
    """Return text-generation-inference's error object."""
    kind = _KINDS.get(error.status, "validation" if error.status < 500 else "generation")
    return {"error": error.message, "error_type": kind}
