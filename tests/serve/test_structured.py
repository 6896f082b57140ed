"""What a text has to be, by OpenAI's field, by vLLM's, and by a call of a tool."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from route_client import CHATS, COMPLETIONS, SAID, SCHEMA, RouteClient

from specbuild.serve.fields import ChatRequest
from specbuild.serve.parameters import DEFAULTS, Caller, sampling
from specbuild.serve.structured import structured
from specbuild.serve.turns.reading import Reading

OF_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}]
NAMED = {"type": "function", "function": {"name": "weather"}}


def asked(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": SAID} | fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}},
            {"json": json.dumps(SCHEMA), "any_whitespace": True},
        ),
        ({"structured_outputs": {"regex": "a+", "disable_any_whitespace": True}}, {"regex": "a+"}),
        ({"tools": TOOLS, "tool_choice": "none"}, None),
        ({"tools": TOOLS, "tool_choice": NAMED}, {"json": json.dumps(SCHEMA)}),
    ],
)
def test_what_is_asked_for(fields: dict[str, Any], expected: dict[str, Any] | None) -> None:
    found = structured(asked(**fields), Reading())
    assert (found and found.to_dict()) == expected


@pytest.mark.parametrize(
    ("fields", "served", "expected"),
    [
        *(({}, None, None), ({}, "</think>", "</think>"), ({"reasoning_end": "</other>"}, "</think>", "</other>")),
        *(({"reasoning_end": "</other>"}, None, "</other>"), ({"reasoning_end": ""}, "</think>", None)),
        ({"structured_outputs": {"regex": "a", "after": "</own>"}, "response_format": None}, "</think>", "</own>"),
        ({"tools": TOOLS, "response_format": None}, "</think>", "</think>"),
    ],
)
def test_it_begins_after_the_reasoning(fields: dict[str, Any], served: str | None, expected: str | None) -> None:
    """The request's own token goes before the server's; the rest is as without either."""
    body = asked(**{"response_format": OF_SCHEMA} | fields)
    found, plain = structured(body, Reading(), served), structured(body, Reading())
    assert found is not None is not plain
    assert (found.after, replace(found, after=None)) == (expected, replace(plain, after=None))
    params = sampling(body, DEFAULTS, 100, Caller(reasoning_end=served))
    assert (params.structured_outputs, params.skip_special_tokens) == (found, expected is None)


def text_of(client: RouteClient, path: str = CHATS, **fields: Any) -> str:
    """The same whole and streamed, with speculation and without."""
    (text,) = {client.choice(path, **{"max_tokens": 40} | fields | way)["text"] for way in ({}, {"speculation": "off"})}
    return str(text)


def test_texts_are_what_was_asked_for(client: RouteClient) -> None:
    jsonschema.validate(json.loads(text_of(client, response_format=OF_SCHEMA)), SCHEMA)
    jsonschema.validate(json.loads(text_of(client, structured_outputs={"json": json.dumps(SCHEMA)})), SCHEMA)
    assert re.fullmatch("[a-f]{4}-[0-9]{2}", text_of(client, structured_outputs={"regex": "[a-f]{4}-[0-9]{2}"}))
    assert text_of(client, structured_outputs={"grammar": 'start: "ab" "cd"'}) == "abcd"
    assert text_of(client, COMPLETIONS, structured_outputs={"choice": ["abc"]}) == "abc"
    for each in client.choices(CHATS, response_format=OF_SCHEMA, n=3, temperature=1, seed=5, max_tokens=40):
        jsonschema.validate(json.loads(each["text"]), SCHEMA)
    assert client.choice(CHATS, response_format=OF_SCHEMA, max_tokens=4)["finish_reason"] == "length"
    (choice,) = client.ask(CHATS, response_format=OF_SCHEMA, receipt=True)["choices"]
    assert choice["receipt"]["parameters"]["structured_outputs"] == {"json": json.dumps(SCHEMA)}
