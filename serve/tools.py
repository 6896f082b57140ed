"""Tools: what a call may be, and the calls that a text makes.

A call that was asked for is JSON alone. One that the model makes of its own accord stands between Hermes' tags, as the
templates of Qwen, Hermes and SmolLM write it.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

import msgspec

from specbuild.runtime import StructuredOutputs

from .errors import ApiError
from .fields import ChatRequest, Function, NamedTool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
Call = dict[str, Any]


def described(body: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools as a template reads them; None where the model may not call any."""
    if not body.tools or body.tool_choice == "none":
        return None
    return [{"type": "function", "function": each.function.model_dump(exclude_none=True)} for each in body.tools]


def structured(body: ChatRequest) -> StructuredOutputs | None:
    """What a text with calls must be; raises ApiError and OptionError."""
    functions, choice = [each.function for each in body.tools or ()], body.tool_choice
    if not functions:
        if choice not in (None, "none"):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        return None
    if len({each.name for each in functions}) < len(functions):
        raise ApiError(400, "two tools have the same name: give each its own", param="tools")
    if isinstance(choice, NamedTool):
        return StructuredOutputs(json=_parameters(_named(functions, choice)))
    if choice == "required":
        return StructuredOutputs(grammar=_calls(functions, body.parallel_tool_calls is not False))
    if choice == "none" or not any(each.strict for each in functions):
        return None
    structures = []
    for each in functions:
        begin = f'{OPEN}\n{{"name": {json.dumps(each.name)}, "arguments": '
        schema = _parameters(each) if each.strict else {"type": "object"}
        structures.append({"begin": begin, "schema": schema, "end": f"}}\n{CLOSE}"})
    return StructuredOutputs(structural_tag={"structures": structures, "triggers": [OPEN]})


def _named(functions: list[Function], choice: NamedTool) -> Function:
    for each in functions:
        if each.name == choice.function.name:
            return each
    raise ApiError(400, f"tool_choice names {choice.function.name!r}, which is no tool", param="tool_choice")


def _parameters(function: Function) -> dict[str, Any]:
    return function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _calls(functions: list[Function], several: bool) -> str:
    """A list of calls, each tool's arguments by a schema of its own, whose references are its own too."""
    rules = list[str]()
    for number, each in enumerate(functions):
        schema = _parameters(each)
        StructuredOutputs(json=schema)  # refuses what is no schema
        begin = json.dumps(f'{{"name":{json.dumps(each.name)},"arguments":')
        given = json.dumps({**schema, "x-guidance": {"whitespace_flexible": False, "lenient": False}})
        rules.append(f'call_{number}: {begin} %json {given} "}}"')
    names = " | ".join(f"call_{number}" for number in range(len(functions)))
    more = '("," call)*' if several else ""
    return "\n".join(["%llguidance {}", f'start: "[" call {more} "]"', f"call: {names}", *rules])


def shown(text: str, body: ChatRequest, ended: bool, after: str | None = None) -> str:
    """What of a text is the message's content for certain, before any call. `after`: ends a reasoning without calls."""
    if not body.tools or body.tool_choice == "none":
        return text
    if after:
        reasoning, end, rest = text.partition(after)
        return reasoning + end + (shown(rest, body, ended) if end else "")
    if body.tool_choice not in (None, "auto"):
        return ""
    at = text.find(OPEN)
    if at >= 0:
        return text[:at]
    held = 0 if ended else next((n for n in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:n])), 0)
    return text[: len(text) - held]


def calls(text: str, body: ChatRequest, after: str | None = None) -> tuple[str, list[Call]]:
    """A whole text's content and calls; what was cut off in the middle of a call is content. `after`: see `shown`."""
    choice = body.tool_choice
    if not body.tools or choice == "none":
        return text, []
    if after:
        reasoning, end, rest = text.partition(after)
        content, made = calls(rest, body) if end else ("", [])
        return reasoning + end + content, made
    if isinstance(choice, NamedTool):
        return "", [_call(choice.function.name, text)]
    if choice == "required":
        return _read(text, [text], lists=True)
    content = shown(text, body, ended=True)
    found = [part.partition(CLOSE)[0] for part in text.split(OPEN)[1:]]
    content, made = _read(content, found)
    return (content, made) if made or not found else (text, [])


def _read(content: str, texts: list[str], lists: bool = False) -> tuple[str, list[Call]]:
    try:
        read = [msgspec.json.decode(text) for text in texts]
        read = [call for each in read for call in each] if lists else read
        made = [_call(call["name"], msgspec.json.encode(call["arguments"]).decode()) for call in read]
    except (ValueError, TypeError, KeyError, RecursionError):
        return (texts[0] if lists else content), []
    return "" if lists else content, made


def _call(name: str, arguments: str) -> Call:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
