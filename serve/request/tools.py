"""Tools: what a call may be, and the calls that a text makes.

A call that the request asks for is JSON only. A call that the model makes on its own has the form that
`--tool-call-parser` names.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

import msgspec

from specbuild.runtime import StructuredOutputs
from specbuild.serve.errors import ApiError
from specbuild.serve.output_parsers.calls import NamedParser, RequiredParser
from specbuild.serve.output_parsers.hermes import CLOSE, OPEN
from specbuild.serve.output_parsers.parser_base import Call, Parser, Piece
from specbuild.serve.output_parsers.reading import Plain, Reading

from .fields import AllowedTools, ChatRequest, Function, NamedTool


def narrowed(body: ChatRequest) -> ChatRequest:
    """Return a request whose `tool_choice` names no subset of its tools: it has these alone. Raises ApiError."""
    choice = body.tool_choice
    if not isinstance(choice, AllowedTools):
        return body
    allowed = choice.allowed_tools
    names, tools = {each.function.name for each in allowed.tools}, body.tools or []
    if unknown := names - {each.function.name for each in tools}:
        raise ApiError(400, f"tool_choice names {min(unknown)!r}, which is no tool", param="tool_choice")
    kept = [each for each in tools if each.function.name in names]
    return msgspec.structs.replace(body, tools=kept, tool_choice=allowed.mode)


def described(body: ChatRequest) -> list[dict[str, Any]] | None:
    """Return the tools in the form that a template reads; None if the model may not call any."""
    if not body.tools or body.tool_choice == "none":
        return None
    return [{"type": "function", "function": msgspec.to_builtins(each.function)} for each in body.tools]


def structured(body: ChatRequest, reading: Reading) -> StructuredOutputs | None:
    """Return the constraint on a text with calls, None if there is none; raises ApiError and OptionError."""
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
        return StructuredOutputs(grammar=_list(functions, body.parallel_tool_calls is not False))
    if choice == "none":
        return None
    if not reading.auto_tool_choice:
        said = "tool_choice auto is off here: say required, none, or a tool; or serve with --enable-auto-tool-choice"
        raise ApiError(400, said, param="tool_choice")
    if not any(each.strict for each in functions):
        return None
    if not reading.constrains:
        said = (
            f"with --tool-call-parser {reading.tool_call_parser} a strict tool needs tool_choice required or its name"
        )
        raise ApiError(400, said, param="tools")
    if reading.tool_call_parser == "llama3_json":
        return StructuredOutputs(grammar=_llama3(functions))
    structures = []
    for each in functions:
        begin = f'{OPEN}\n{{"name": {json.dumps(each.name)}, "arguments": '
        structures.append({"begin": begin, "schema": _free(each), "end": f"}}\n{CLOSE}"})
    return StructuredOutputs(structural_tag={"structures": structures, "triggers": [OPEN]})


def _named(functions: list[Function], choice: NamedTool) -> Function:
    for each in functions:
        if each.name == choice.function.name:
            return each
    raise ApiError(400, f"tool_choice names {choice.function.name!r}, which is no tool", param="tool_choice")


def _parameters(function: Function) -> dict[str, Any]:
    return function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _free(function: Function) -> dict[str, Any]:
    """Return the schema for the arguments of a call that the model makes on its own."""
    return _parameters(function) if function.strict else {"type": "object"}


def _list(functions: list[Function], several: bool) -> str:
    """Return the grammar of a list of calls."""
    given = [(f'{{"name":{json.dumps(each.name)},"arguments":', _parameters(each)) for each in functions]
    more = '("," call)*' if several else ""
    return "\n".join(["%llguidance {}", f'start: "[" call {more} "]"', *_rules(given)])


def _llama3(functions: list[Function]) -> str:
    """Return the grammar of a text that is calls if its first character begins one, and free otherwise."""
    given = [(f'{{"name": {json.dumps(each.name)}, "parameters": ', _free(each)) for each in functions]
    return "\n".join(
        ["%llguidance {}", 'start: TEXT | call ("; " call)*', r"TEXT: /\s*([^\s{](.|\n)*)?/", *_rules(given)]
    )


def _rules(given: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return the rule `call`, one of these tools; each tool's arguments have a schema and references of their own."""
    rules = list[str]()
    for number, (begin, schema) in enumerate(given):
        StructuredOutputs(json=schema)  # raises OptionError if it is no schema
        held = json.dumps({**schema, "x-guidance": {"whitespace_flexible": False, "lenient": False}})
        rules.append(f'call_{number}: {json.dumps(begin)} %json {held} "}}"')
    names = " | ".join(f"call_{number}" for number in range(len(given)))
    return [f"call: {names}", *rules]


def parser(body: ChatRequest, reading: Reading) -> Parser:
    """Return the parser for the calls and the content of a text."""
    choice = body.tool_choice
    if not body.tools or choice == "none":
        return Plain()
    if isinstance(choice, NamedTool):
        return NamedParser(choice.function.name)
    return RequiredParser() if choice == "required" else reading.free()


def told(call: Call) -> dict[str, Any]:
    """Return a call as a message has it, with a new id."""
    return {"id": new_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def deltas(pieces: list[Piece]) -> list[dict[str, Any]]:
    """Return the calls of pieces in the form of a stream event."""
    said: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if piece.kind == "call":
            said[piece.number] = {"index": piece.number, **told(Call(piece.text))}
        elif piece.kind == "arguments":
            one = said.setdefault(piece.number, {"index": piece.number, "function": {"arguments": ""}})
            one["function"]["arguments"] += piece.text
    return list(said.values())


def new_id() -> str:
    """Return a new id of a call: nine letters and digits, because Mistral's templates accept no others."""
    return secrets.token_hex(5)[:9]


def read_back(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a message's calls as templates read them, with arguments as objects; raises ApiError."""
    return [_read_back(call) for call in calls]


def _read_back(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        name = str(function.get("name"))[:64]
        said = f"a call of {name!r} has arguments that are no JSON object: send what the model wrote whole"
        raise ApiError(400, said, param="messages")
    return {**call, "function": {**function, "arguments": arguments}}
