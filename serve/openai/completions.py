"""/v1/completions: texts that continue prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specbuild.runtime import Chunk, TokenLogprobs
from specbuild.serve.options import ServeOptions
from specbuild.serve.request.fields import CompletionRequest
from specbuild.serve.request.generation import Generation

from . import logprobs
from .formats import ChoicesFormat


@dataclass(slots=True)
class _SentText:
    """The part of a sample's text that the client has, and the tokens whose texts are not complete yet."""

    offsets: logprobs.Offsets
    begins: int  # where the sample's own text begins, behind the echo
    length: int
    waiting: list[tuple[int, TokenLogprobs | None, int]] = field(default_factory=list)


class CompletionFormat(ChoicesFormat):
    """Formats `text_completion` objects."""

    whole_object = part_object = operation = "text_completion"
    prefix = "cmpl"

    def __init__(self, generation: Generation, options: ServeOptions) -> None:
        super().__init__(generation, options)
        body = generation.body
        self.begins = isinstance(body, CompletionRequest) and bool(body.echo)
        self._sent = dict[int, _SentText]()  # by choice

    def choice(self, number: int, chunk: Chunk) -> dict[str, Any]:
        """See `ChoicesFormat.choice`."""
        return self._text_part(number, chunk, first=True)

    def delta(self, number: int, chunk: Chunk, first: bool) -> dict[str, Any]:
        """See `ChoicesFormat.delta`."""
        return self._text_part(number, chunk, first)

    def _text_part(self, number: int, chunk: Chunk, first: bool) -> dict[str, Any]:
        echoed = self.generation.echoed[chunk.index] if first and self.begins else ""
        return {"text": echoed + chunk.text, "logprobs": self._logprobs(number, chunk)}

    def _logprobs(self, number: int, chunk: Chunk) -> Any:
        """Return the log-probabilities of the tokens that have come, but for those whose text may yet be cut off.

        A stop string holds text back: only where the text then ends is it known where such tokens begin.
        """
        if chunk.logprobs is None:
            return None
        told = self._sent.get(number) or self._sent.setdefault(number, self._begin(chunk))
        for token, each in zip(chunk.token_ids, chunk.logprobs, strict=True):
            told.waiting.append((token, each, told.begins + told.offsets.next(token)))
        told.length += len(chunk.text)
        count = len(told.waiting)
        if chunk.result is None:
            count = sum(offset <= told.length for _, _, offset in told.waiting)
        ready, told.waiting = told.waiting[:count], told.waiting[count:]
        within = [(token, each, min(offset, told.length)) for token, each, offset in ready]
        return logprobs.completion(self.generation.engine, within)

    def _begin(self, chunk: Chunk) -> _SentText:
        """Return what is told of a sample before its first token: the echoed prompt, if it is asked for."""
        tokenizer, prompt = self.generation.engine.tokenizer, self.generation.prompts[chunk.index]
        shows = not self.generation.params.skip_special_tokens
        offsets = logprobs.Offsets(tokenizer, prompt, lambda text, at: shows)
        if not self.begins:
            return _SentText(offsets, 0, 0)
        echoed = self.generation.echoed[chunk.index]
        before = logprobs.Offsets(tokenizer, (), lambda text, at: echoed.startswith(text, at))
        given = zip(prompt, chunk.prompt_logprobs or [None], strict=True)  # a prompt of one token is not read
        waiting = [(token, each, min(before.next(token), len(echoed))) for token, each in given]
        return _SentText(offsets, len(echoed), len(echoed), waiting)
