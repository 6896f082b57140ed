"""/v1/chat/completions: the model's next message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbuild.runtime import Chat, Chunk, Engine, StructuredOutputs
from specbuild.serve.errors import ApiError, blaming
from specbuild.serve.output_parsers.parser_base import Parser, Piece
from specbuild.serve.output_parsers.reading import TurnReader
from specbuild.serve.output_parsers.reasoning import Reasoning, ReasoningParser
from specbuild.serve.request import tools
from specbuild.serve.request.fields import ChatRequest, Message, NamedTool
from specbuild.serve.request.generation import Generation

from . import logprobs
from .formats import Format

_EMPTY = {"refusal", "audio", "function_call", "annotations"}  # OpenAI's, empty in messages that clients send back


def chat_of(
    messages: list[Message],
    variables: Mapping[str, Any] | None,
    add_generation_prompt: bool | None = None,
    described: list[dict[str, Any]] | None = None,
) -> Chat:
    """Return a chat, with tools as described, in the form that the model's template reads; raises ApiError."""
    begin = True if add_generation_prompt is None else add_generation_prompt
    plain = [_plain(each) for each in messages]
    with blaming("chat_template_kwargs"):
        Chat(plain[:1], variables=variables or {})
    with blaming("messages"):
        return Chat(plain, described, begin, variables or {})


def asked_chat(body: ChatRequest) -> Chat:
    """Return the chat of a request; raises ApiError."""
    variables = (body.chat_template_kwargs or {}) | template_fields(body)
    return chat_of(body.messages, variables, body.add_generation_prompt, tools.described(body))


def template_fields(body: ChatRequest) -> dict[str, Any]:
    """Return the fields of a request that only a chat template can follow."""
    given = {name: getattr(body, name) for name in ("reasoning_effort", "verbosity", "enable_thinking")}
    return {name: value for name, value in given.items() if value is not None}


def check_template_fields(engine: Engine, body: ChatRequest, reasons: bool) -> None:
    """Raise ApiError for a field that would change the text and that the model's template does not read.

    `reasons`: whether the model may reason; one that does not has nothing to be told to leave out.
    """
    for name, value in template_fields(body).items():
        with blaming("messages"):
            reads = engine.tokenizer.template_reads(name)
        if not reads and (reasons or value is not False):
            raise ApiError(400, f"{name} is not read by this model's chat template: leave it out", param=name)


def encoded(engine: Engine, chat: Chat) -> list[int]:
    """Return a chat's token ids; raises ApiError for the field that the model's template does not take."""
    tokenizer = engine.tokenizer
    if not tokenizer.chats:
        told = "this model has no chat template: serve it with --chat-template hermes, or a file, or use completions"
        raise ApiError(400, told, param="messages")
    with blaming("messages"):
        reads = not chat.tools or tokenizer.template_reads("tools")
    with blaming("messages" if reads else "tools"):
        return engine.encode(chat)


def _plain(message: Message) -> dict[str, Any]:
    """Return the fields that the client gave, in the template's form."""
    known = [name for name in Message.__struct_fields__ if name not in _EMPTY]
    given = {name: value for name in known if (value := getattr(message, name)) is not None}
    if isinstance(message.content, list):
        given["content"] = [{"type": part.type, "text": part.text} for part in message.content]
    if message.tool_calls is not None:
        given["tool_calls"] = tools.read_back(message.tool_calls)
    role = "system" if message.role == "developer" else message.role
    return {"content": None, **given, "role": role}


class ChatFormat(Format):
    """Formats `chat.completion` objects and their chunks."""

    whole, part = "chat.completion", "chat.completion.chunk"
    prefix, operation, begins = "chatcmpl", "chat", True

    def __init__(self, generation: Generation, *given: Any) -> None:
        super().__init__(generation, *given)
        self._readers = dict[int, TurnReader]()  # by choice

    def tokenize(self, engine: Engine) -> list[list[int]]:
        """See `Format.tokenize`."""
        body = self.generation.body
        assert isinstance(body, ChatRequest)
        check_template_fields(engine, body, self.generation.caller.reading.reasoning is not None)
        return [encoded(engine, asked_chat(body))]

    def choice(self, number: int, chunk: Chunk) -> dict[str, Any]:
        """See `Format.choice`."""
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
        """See `Format.delta`."""
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
        state = generation.prompt_reasons()
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
        """See `Format.reasoning_tokens`."""
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
