"""A chat as its model's template reads it, and its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbuild.runtime import Chat, Engine
from specbuild.serve.errors import ApiError, blaming

from . import tools
from .fields import ChatRequest, Message

_EMPTY = {"refusal", "audio", "function_call", "annotations"}  # OpenAI's, empty in messages that clients send back
_OF_TEMPLATES = ("reasoning_effort", "verbosity", "enable_thinking")  # fields that only a chat template can follow


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


def requested_chat(body: ChatRequest) -> Chat:
    """Return the chat of a request; raises ApiError."""
    variables = (body.chat_template_kwargs or {}) | _template_fields(body)
    return chat_of(body.messages, variables, body.add_generation_prompt, tools.described(body))


def chat_tokens(engine: Engine, body: ChatRequest, reasons: bool) -> list[int]:
    """Return the tokens of a request's chat; raises ApiError.

    `reasons`: whether the model may reason; one that does not has nothing to be told to leave out.
    """
    for name, value in _template_fields(body).items():
        with blaming("messages"):
            reads = engine.tokenizer.template_reads(name)
        if not reads and (reasons or value is not False):
            raise ApiError(400, f"{name} is not read by this model's chat template: leave it out", param=name)
    return encoded(engine, requested_chat(body))


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


def _template_fields(body: ChatRequest) -> dict[str, Any]:
    return {name: value for name in _OF_TEMPLATES if (value := getattr(body, name)) is not None}


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
