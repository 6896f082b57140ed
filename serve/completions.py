"""/v1/completions: texts that continue prompts."""

from __future__ import annotations

from typing import Any

from specbuild.runtime import Chunk, Engine, TokenLogprobs

from . import logprobs
from .errors import ApiError
from .fields import CompletionRequest
from .formats import Format
from .generation import Generation


def prompts_of(body: CompletionRequest) -> list[str | list[int]]:
    """Return a request's prompts, each a text or token ids; raises ApiError for unsupported fields of OpenAI's."""
    if body.suffix is not None:
        raise ApiError(400, "suffix is not supported: models here only go on from a prompt", param="suffix")
    if body.best_of not in (None, 1) and body.best_of != body.n:
        raise ApiError(400, "best_of is not supported: ask for n, and choose", param="best_of")
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if all(isinstance(each, int) for each in given):
        return [[int(each) for each in given]]  # type: ignore[arg-type]
    return list(given)  # type: ignore[arg-type]


class CompletionFormat(Format):
    """Formats `text_completion` objects."""

    whole = part = operation = "text_completion"
    prefix = "cmpl"

    def __init__(self, generation: Generation, *given: Any) -> None:
        super().__init__(generation, *given)
        body = generation.body
        self._echo = self.begins = isinstance(body, CompletionRequest) and bool(body.echo)
        self._offsets = dict[int, int]()
        self.echoed = list[str]()  # texts of the prompts
        self.echoed_logprobs = list[list[TokenLogprobs | None]]()

    def tokenize(self, engine: Engine) -> list[list[int]]:
        """See `Format.tokenize`; also keeps the echoed prompts' texts and log-probabilities."""
        body = self.generation.body
        assert isinstance(body, CompletionRequest)
        given = prompts_of(body)
        tokens = [engine.encode(each) for each in given]
        if self._echo:
            self.echoed = [each if isinstance(each, str) else engine.decode(each) for each in given]
            if body.logprobs is not None:
                self.echoed_logprobs = [logprobs.of_prompt(engine, each, body.logprobs) for each in tokens]
        return tokens

    def choice(self, number: int, chunk: Chunk) -> dict[str, Any]:
        """See `Format.choice`."""
        return self._shown(number, chunk, first=True)

    def delta(self, number: int, chunk: Chunk, first: bool) -> dict[str, Any]:
        """See `Format.delta`."""
        return self._shown(number, chunk, first)

    def _shown(self, number: int, chunk: Chunk, first: bool) -> dict[str, Any]:
        echoed = self.echoed[chunk.index] if first and self._echo else ""
        return {"text": echoed + chunk.text, "logprobs": self._logprobs(number, chunk, bool(first and self._echo))}

    def _logprobs(self, number: int, chunk: Chunk, echoed: bool) -> Any:
        if chunk.logprobs is None:
            return None
        tokens, given = list(chunk.token_ids), list[TokenLogprobs | None](chunk.logprobs)
        if echoed:
            tokens = self.generation.prompts[chunk.index] + tokens
            given = self.echoed_logprobs[chunk.index] + given
        told = logprobs.completion(self.generation.engine, tokens, given, self._offsets.get(number, 0))
        self._offsets[number] = self._offsets.get(number, 0) + sum(map(len, told["tokens"]))
        return told
