"""Constraints on a text: response_format, vLLM's structured_outputs, and tool calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specbuild.runtime import StructuredOutputs
from specbuild.serve.errors import ApiError
from specbuild.serve.output_parsers.reading import Reading

from . import tools
from .fields import ChatRequest, ResponseFormat, Sampling, StructuredFields


def structured(body: Sampling, reading: Reading, reasoning_end: str | None = None) -> StructuredOutputs | None:
    """Return the constraint on a request's text, None if there is none.

    Args:
        body: The request's fields.
        reading: How turns are read.
        reasoning_end: The server's token before which texts are free; the request's own has priority, "" is none.

    Raises:
        ApiError: If a constraint is not supported, or two are given.
        OptionError: If a constraint is wrong.
    """
    ways = {
        "response_format": _of_format(body.response_format) if body.response_format else None,
        "structured_outputs": _of_fields(body.structured_outputs) if body.structured_outputs else None,
        "tool_choice": tools.structured(body, reading) if isinstance(body, ChatRequest) else None,
    }
    asked = {name: way for name, way in ways.items() if way is not None}
    if len(asked) > 1:
        told = " and ".join(asked)
        raise ApiError(400, f"{told} each say what the text must be: give one of them", param=next(iter(asked)))
    found = next(iter(asked.values()), None)
    after = reasoning_end if body.reasoning_end is None else body.reasoning_end
    return replace(found, after=after) if found and after and found.after is None else found


def _of_format(given: ResponseFormat) -> StructuredOutputs | None:
    if given.type == "text":
        return None
    if given.type == "json_object":
        return StructuredOutputs(json_object=True)
    if given.json_schema is None or given.json_schema.schema is None:
        raise ApiError(400, "response_format of type json_schema needs json_schema.schema", param="response_format")
    return StructuredOutputs(json=given.json_schema.schema)


def _of_fields(given: StructuredFields) -> StructuredOutputs:
    for name in ("whitespace_pattern", "disable_additional_properties"):
        if getattr(given, name):
            raise ApiError(400, f"structured_outputs.{name} is not supported: leave it out", param="structured_outputs")
    said: dict[str, Any] = {"json": given.json, "any_whitespace": given.disable_any_whitespace is False}
    said |= {name: getattr(given, name) for name in ("regex", "choice", "grammar", "structural_tag", "after")}
    return StructuredOutputs(**said, json_object=bool(given.json_object))
