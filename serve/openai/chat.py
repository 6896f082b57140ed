"""/v1/chat/completions: the model's next message."""

from __future__ import annotations

from typing import Any

from specbuild.runtime import Chunk, StructuredOutputs
from specbuild.serve.options import ServeOptions
from specbuild.serve.output_parsers.parser_base import Parser, Piece
from specbuild.serve.output_parsers.reading import TurnReader
from specbuild.serve.output_parsers.reasoning import Reasoning, ReasoningParser
from specbuild.serve.request import tools
from specbuild.serve.request.fields import ChatRequest, NamedTool
from specbuild.serve.request.generation import Generation

from . import logprobs
from .formats import ChoicesFormat


class ChatFormat(ChoicesFormat):
    """Formats `chat.completion` objects and their chunks."""

    whole_object, part_object = "chat.completion", "chat.completion.chunk"
    prefix, operation, begins = "chatcmpl", "chat", True

    def __init__(self, generation: Generation, options: ServeOptions) -> None:
        super().__init__(generation, options)
        self._readers = dict[int, TurnReader]()  # by choice

    def choice(self, number: int, chunk: Chunk) -> dict[str, Any]:
        """See `ChoicesFormat.choice`."""
        self.read(number, chunk)
        turn = self._readers[number].turn
        calls = [tools.told(call) for call in turn.calls]
        content = turn.content if turn.content or not calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message, "logprobs": self._logprobs(chunk)}

    def delta(self, number: int, chunk: Chunk, first: bool) -> dict[str, Any]:
        """See `ChoicesFormat.delta`."""
        said: dict[str, Any] = {"role": "assistant"} if first else {}
        pieces = self.read(number, chunk)
        if reasoning := "".join(each.text for each in pieces if each.kind == "reasoning"):
            said["reasoning_content"] = reasoning
        text = "".join(each.text for each in pieces if each.kind == "content")
        if first or text:
            said["content"] = text
        if calls := tools.deltas(pieces):
            said["tool_calls"] = calls
        return {"delta": said, "logprobs": self._logprobs(chunk)}

    def read(self, number: int, chunk: Chunk) -> list[Piece]:
        """Return the pieces of a turn that a chunk makes certain."""
        if number not in self._readers:
            self._readers[number] = TurnReader(self._parser(), self._body.parallel_tool_calls is not False)
        return self._readers[number].feed(chunk.text, chunk.result is not None)

    def _parser(self) -> Parser:
        generation, reading = self.generation, self.generation.caller.reading
        after, how = tools.parser(self._body, reading), reading.reasoning
        outputs = generation.params.structured_outputs
        held_after = StructuredOutputs.of(outputs).after if outputs else None
        if how is None:
            calls = bool(self._body.tools) and self._body.tool_choice != "none"
            hides = held_after and calls  # the reasoning begins the content and has no calls
            return ReasoningParser(Reasoning("", held_after or ""), True, after, "content") if hides else after
        state = generation.reasoning
        if held_after is None and state == "ended":
            return after
        inside = held_after is not None or state == "begun" or how.always
        return ReasoningParser(Reasoning(how.start, held_after or how.end), inside, after)

    def _end(self, number: int, chunk: Chunk) -> dict[str, Any]:
        told = super()._end(number, chunk)
        named = isinstance(self._body.tool_choice, NamedTool)  # as OpenAI says of a call that the client has chosen
        if told["finish_reason"] == "stop" and self._readers[number].turn.calls and not named:
            told["finish_reason"] = "tool_calls"
        return told

    def reasoning_tokens(self, number: int) -> int:
        """See `ChoicesFormat.reasoning_tokens`."""
        how, emitted = self.generation.caller.reading.reasoning, self.generation.results[number].token_ids
        end = self.generation.engine.tokenizer.token_id(how.end) if how else None
        if end in emitted:
            return emitted.index(end) + 1
        turn = self._readers[number].turn
        return len(emitted) if turn.reasoning and not (turn.content or turn.calls) else 0

    @property
    def _body(self) -> ChatRequest:
        body = self.generation.body
        assert isinstance(body, ChatRequest)
        return body

    def _logprobs(self, chunk: Chunk) -> Any:
        return None if chunk.logprobs is None else logprobs.chat(self.generation.engine, chunk.logprobs)
