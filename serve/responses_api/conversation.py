"""Translates the request of a response into a chat: items become messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from specbuild.serve.errors import ApiError
from specbuild.serve.request.body import converted
from specbuild.serve.request.fields import ChatRequest

from .fields import SAMPLING, AllowedFlat, FlatChoice, FlatTool, Item, ResponsesRequest, TextFormat, TextOptions

_NAMES = {
    **{"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"},
    **{"reasoning_effort": "reasoning.effort", "verbosity": "text.verbosity"},
}


def items_of(asked: ResponsesRequest) -> list[Item]:
    """Return the input as items."""
    if isinstance(asked.input, str):
        return [Item(type="message", role="user", content=asked.input)]
    return list(asked.input)


def chat_of(asked: ResponsesRequest, before: Sequence[Item]) -> ChatRequest:
    """Return the chat of a request; `before`: items of the conversation that it continues. Raises ApiError."""
    messages = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    text = asked.text or TextOptions()
    return converted(
        ChatRequest,
        {name: getattr(asked, name) for name in SAMPLING}
        | {
            "messages": messages + messages_of([*before, *items_of(asked)]),
            "max_tokens": asked.max_output_tokens,
            "stream_options": msgspec.to_builtins(asked.stream_options),
            "tools": [{"type": "function", "function": _without_type(each)} for each in asked.tools or ()] or None,
            "tool_choice": _choice(asked),
            "response_format": text.format and _format(text.format),
            "verbosity": text.verbosity,
            "reasoning_effort": asked.reasoning and asked.reasoning.effort,
        },
    )


def _choice(asked: ResponsesRequest) -> Any:
    """Return the tool choice as a chat has it; without tools "auto" and "none" say nothing."""
    choice = asked.tool_choice
    if isinstance(choice, FlatChoice):
        return _named(choice)
    if isinstance(choice, AllowedFlat):
        allowed = {"mode": choice.mode, "tools": [_named(each) for each in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice if asked.tools or choice == "required" else None


def _named(choice: FlatChoice) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.name}}


def asked_name(field: str) -> str:
    """Return the name that a chat's field has in a request of a response."""
    return _NAMES.get(field.partition(".")[0], field)


def _format(given: TextFormat) -> dict[str, Any]:
    if given.type != "json_schema":
        return {"type": given.type}
    return {"type": "json_schema", "json_schema": _without_type(given)}


def _without_type(given: TextFormat | FlatTool) -> dict[str, Any]:
    """Return the fields for the place where a chat has them: one level down, where they have no type."""
    told = msgspec.structs.asdict(given)
    del told["type"]
    return told


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return a chat's messages; consecutive reasoning, text and calls of the assistant become one. Raises ApiError."""
    messages = list[dict[str, Any]]()
    for number, item in enumerate(items):
        told = _message(item, number)
        last = messages[-1] if messages else {}
        if told["role"] == "assistant" and last.get("role") == "assistant" and not _closed(last, told):
            last["tool_calls"] = last.get("tool_calls", []) + told.pop("tool_calls", [])
            if not last["tool_calls"]:
                del last["tool_calls"]
            last.update({name: value for name, value in told.items() if value is not None})
        else:
            messages.append(told)
    return messages


def _closed(last: dict[str, Any], told: dict[str, Any]) -> bool:
    """Return whether an item of the assistant begins a new message instead of joining the last one."""
    reasons = "reasoning_content" in told and bool(last.get("content") or last.get("tool_calls"))
    return reasons or (told["content"] is not None and bool(last.get("content") or last.get("tool_calls")))


def _message(item: Item, number: int) -> dict[str, Any]:
    kind = item.type or "message"
    needed = {
        "message": ("role", "content"),
        "function_call": ("call_id", "name", "arguments"),
        "function_call_output": ("call_id", "output"),
        "reasoning": (),
    }[kind]
    for name in needed:
        if getattr(item, name) is None:
            raise ApiError(400, f"input.{number} is a {kind} without {name}", param=f"input.{number}.{name}")
    if kind == "message":
        return {"role": "system" if item.role == "developer" else item.role, "content": text_of(item.content)}
    if kind == "function_call":
        call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)}
    return {"role": "assistant", "content": None, "reasoning_content": text_of(item.content)}


def text_of(content: Any) -> str:
    """Return a content's text; the content is a string, parts with text, or None."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())
