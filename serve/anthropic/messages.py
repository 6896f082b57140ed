"""/v1/messages: translates Anthropic's request into a chat, and a turn into Anthropic's message, whole or streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from specbuild.runtime import Chunk
from specbuild.serve.errors import ApiError, api_error
from specbuild.serve.openai.chat import ChatFormat
from specbuild.serve.openai.formats import named_event
from specbuild.serve.options import ServeOptions
from specbuild.serve.output_parsers.parser_base import Piece
from specbuild.serve.request import tools
from specbuild.serve.request.body import converted
from specbuild.serve.request.fields import ChatRequest
from specbuild.serve.request.generation import Generation
from specbuild.serve.responses_api.conversation import text_of

from .fields import SAMPLING, Block, CountRequest, MessagesRequest, MessageTool, OutputOptions, TurnMessage

PATH = "/v1/messages"
Event = dict[str, Any]
_NAMES = {"stop": "stop_sequences", "user": "metadata.user_id", "parallel_tool_calls": "tool_choice"} | {
    **{"enable_thinking": "thinking", "reasoning_effort": "output_config.effort"},
    **{"response_format": "output_config.format"},
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_NEEDED = {"text": ("text",), "tool_use": ("id", "name", "input"), "tool_result": ("tool_use_id",), "thinking": ()}
_KINDS = {"content": "text", "reasoning": "thinking", "call": "tool_use", "arguments": "tool_use"}
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
_TYPES = {  # error types by status
    **{401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"},
    **{500: "api_error", 503: "overloaded_error"},
}


def chat_of(asked: CountRequest) -> ChatRequest:
    """Return the chat of a request; raises ApiError."""
    system = [{"role": "system", "content": text_of(asked.system)}] if asked.system else []
    options, choice = asked.output_config or OutputOptions(), asked.tool_choice
    fields: dict[str, Any] = {name: getattr(asked, name, None) for name in SAMPLING}
    fields["messages"] = system + [
        each for number, said in enumerate(asked.messages) for each in _chat_messages(said, number)
    ]
    fields["tools"] = [{"type": "function", "function": _function(each)} for each in asked.tools or ()] or None
    fields["reasoning_effort"] = options.effort
    if isinstance(asked, MessagesRequest):
        fields |= {"stop": asked.stop_sequences, "user": asked.metadata and asked.metadata.user_id}
    if asked.thinking and asked.thinking.type != "adaptive":
        fields["enable_thinking"] = asked.thinking.type == "enabled"
    if options.format:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": options.format.schema}}
    if choice:
        if (choice.type == "tool") != bool(choice.name):
            raise ApiError(400, "tool_choice has a name where its type is tool, and nowhere else", param="tool_choice")
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = named if choice.name else _CHOICES[choice.type]
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return converted(ChatRequest, fields)


def _function(tool: MessageTool) -> dict[str, Any]:
    told = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    return told | {"parameters": tool.input_schema}


def asked_name(field: str) -> str:
    """Return Anthropic's name of a chat's field."""
    return _NAMES.get(field.partition(".")[0], field)


def _chat_messages(said: TurnMessage, number: int) -> Iterator[dict[str, Any]]:
    """Yield the chat's messages for one of Anthropic's; each tool result becomes a message of its own."""
    if isinstance(said.content, str):
        yield {"role": said.role, "content": said.content}
        return
    for at, block in enumerate(said.content):
        _check(block, said.role, f"messages.{number}.content.{at}")
    for block in said.content:
        if block.type == "tool_result":
            failed = "Error: " if block.is_error else ""
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": failed + text_of(block.content)}
    told: dict[str, Any] = {"role": said.role, "content": "".join(block.text or "" for block in said.content) or None}
    if reasoning := "".join(block.thinking or "" for block in said.content):
        told["reasoning_content"] = reasoning
    if calls := [block for block in said.content if block.type == "tool_use"]:
        functions = [{"name": call.name, "arguments": json.dumps(call.input)} for call in calls]
        numbered = zip(calls, functions, strict=True)
        told["tool_calls"] = [{"id": call.id, "type": "function", "function": each} for call, each in numbered]
    if len(told) > 2 or told["content"]:
        yield told


def _check(block: Block, role: str, where: str) -> None:
    for name in _NEEDED[block.type]:
        if getattr(block, name) is None:
            raise ApiError(400, f"{where} is a {block.type} without {name}", param=f"{where}.{name}")
    if block.type != "text" and (block.type == "tool_result") != (role == "user"):
        raise ApiError(400, f"{where}: a {block.type} is not what the {role} says", param=where)


class Content:
    """The content blocks of one message, in order; `blocks` has those that have begun."""

    def __init__(self) -> None:
        self.blocks = list[dict[str, Any]]()
        self._arguments: str | None = None  # JSON text of the open call's arguments
        self._open = False

    def add(self, piece: Piece) -> Iterator[Event]:
        """Yield the events of a piece."""
        kind = _KINDS[piece.kind]
        if self._open and (piece.kind == "call" or self.blocks[-1]["type"] != kind):
            yield from self.close()
        if not self._open:
            yield self._begin(kind, piece)
        if piece.kind == "call" or not piece.text:
            return
        delta, name = _DELTAS[kind]
        if self._arguments is None:
            self.blocks[-1][name] += piece.text
        else:
            self._arguments += piece.text
        told = {"type": delta, name: piece.text}
        yield {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": told}

    def close(self) -> Iterator[Event]:
        """Yield the event that ends the open block, if any. Arguments that were cut off are no JSON and become {}."""
        if not self._open:
            return
        if self._arguments is not None:
            try:
                self.blocks[-1]["input"] = json.loads(self._arguments or "{}")
            except ValueError:
                self.blocks[-1]["input"] = {}
        self._open, self._arguments = False, None
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _begin(self, kind: str, piece: Piece) -> Event:
        block: dict[str, Any] = {"type": kind}
        if kind == "tool_use":
            block |= {"id": f"toolu_{tools.new_id()}", "name": piece.text, "input": {}}
            self._arguments = ""
        else:
            block |= {"text": ""} if kind == "text" else {"thinking": "", "signature": ""}
        self._open = True
        self.blocks.append(block)
        return {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}


class MessageFormat(ChatFormat):
    """Formats `message` objects and Anthropic's stream events."""

    prefix = "msg"

    def __init__(self, generation: Generation, options: ServeOptions) -> None:
        super().__init__(generation, options)
        self._content = Content()
        self._started = False

    def add(self, chunk: Chunk) -> None:
        """See `Format.add`."""
        for _ in self._events(chunk):
            pass

    def whole(self) -> dict[str, Any]:
        """See `Format.whole`."""
        return self._message() | self._ended()

    def part(self, chunk: Chunk) -> Iterator[bytes]:
        """See `Format.part`."""
        if not self._started:
            yield named_event({"type": "message_start", "message": self._message()})
        self._started = True
        yield from map(named_event, self._events(chunk))

    def last(self) -> Iterator[bytes]:
        """See `Format.last`."""
        if self.failed:
            yield named_event(error_body(api_error(self.failed)))
            return
        told = self._ended()
        usage, delta = told.pop("usage"), {name: told.pop(name) for name in ("stop_reason", "stop_sequence")}
        yield named_event({"type": "message_delta", "delta": delta, "usage": usage, **told})
        yield named_event({"type": "message_stop"})

    def _events(self, chunk: Chunk) -> Iterator[Event]:
        for piece in self.read(0, chunk):
            yield from self._content.add(piece)
        if chunk.result:
            yield from self._content.close()

    def _message(self) -> dict[str, Any]:
        """Return the message as far as it has been decoded."""
        return {
            **{"id": self.head["id"], "type": "message", "role": "assistant", "model": self.head["model"]},
            **{"content": self._content.blocks, "stop_reason": None, "stop_sequence": None, "usage": self._used()},
        }

    def _ended(self) -> dict[str, Any]:
        """Return the fields that a message gets at its end."""
        result = self.generation.results[0]
        told: dict[str, Any] = {"stop_reason": "max_tokens", "stop_sequence": None, "usage": self._used()}
        if result.finish_reason == "stop":
            stopped = result.stop_reason if isinstance(result.stop_reason, str) else None
            called = any(block["type"] == "tool_use" for block in self._content.blocks)
            ended = "tool_use" if called else "end_turn"
            told["stop_reason"] = "stop_sequence" if stopped else ended
            told["stop_sequence"] = stopped
        return told | self.metrics([result])

    def _used(self) -> dict[str, Any]:
        """Return the token usage; prompt tokens read from the prefix cache are counted separately."""
        result = self.generation.results.get(0)
        cached = result.metrics.num_cached_tokens if result and result.metrics else 0
        emitted = len(result.token_ids) if result else 0
        cache = {"cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}
        return {"input_tokens": self.prompt_tokens - cached, "output_tokens": emitted, **cache}


def error_body(error: ApiError) -> dict[str, Any]:
    """Return Anthropic's error object."""
    kind = _TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}
