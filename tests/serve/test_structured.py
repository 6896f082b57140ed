"""What a text has to be, by OpenAI's field, by vLLM's, and by a call of a tool."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from fastapi.testclient import TestClient

from specbuild.runtime import Engine, StructuredOutputs
from specbuild.runtime.errors import OptionError
from specbuild.serve.errors import ApiError
from specbuild.serve.fields import ChatRequest, CompletionRequest
from specbuild.serve.parameters import DEFAULTS, Caller, sampling
from specbuild.serve.structured import structured
from specbuild.serve.turns.reading import Reading

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["alpha", "beta"]}, "n": {"$ref": "#/$defs/n"}},
    "required": ["name", "n"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer", "minimum": 1, "maximum": 99}},
}
OF_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}]
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 40, "temperature": 0}


def of(**fields: Any) -> StructuredOutputs | None:
    return structured(ChatRequest.model_validate(CHAT | fields), Reading())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": OF_SCHEMA}, {"json": json.dumps(SCHEMA)}),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}},
            {"json": json.dumps(SCHEMA), "any_whitespace": True},
        ),
        ({"structured_outputs": {"regex": "a+", "disable_any_whitespace": True}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        (
            {"structured_outputs": {"json_object": True, "after": "</think>"}},
            {"json_object": True, "after": "</think>"},
        ),
        ({"tools": TOOLS, "tool_choice": "none"}, None),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
            {"json": json.dumps(SCHEMA)},
        ),
    ],
)
def test_what_is_asked_for(fields: dict[str, Any], expected: dict[str, Any] | None) -> None:
    found = of(**fields)
    assert (found and found.to_dict()) == expected


@pytest.mark.parametrize(
    ("fields", "served", "expected"),
    [
        ({"response_format": OF_SCHEMA}, None, None),
        ({"response_format": OF_SCHEMA}, "</think>", "</think>"),
        ({"response_format": OF_SCHEMA, "reasoning_end": "</other>"}, "</think>", "</other>"),
        ({"response_format": OF_SCHEMA, "reasoning_end": "</other>"}, None, "</other>"),
        ({"response_format": OF_SCHEMA, "reasoning_end": ""}, "</think>", None),
        ({"structured_outputs": {"regex": "a", "after": "</own>"}}, "</think>", "</own>"),
        ({"structured_outputs": {"regex": "a"}}, "</think>", "</think>"),
        ({"tools": TOOLS, "tool_choice": "required"}, "</think>", "</think>"),
        ({"tools": TOOLS}, "</think>", "</think>"),
    ],
)
def test_it_begins_after_the_reasoning(fields: dict[str, Any], served: str | None, expected: str | None) -> None:
    """The request's own token goes before the server's; the rest is as without either."""
    asked = ChatRequest.model_validate(CHAT | fields)
    found, plain = structured(asked, Reading(), served), structured(asked, Reading())
    assert found
    assert plain
    assert found.after == expected
    assert replace(found, after=None) == replace(plain, after=None)
    params = sampling(asked, DEFAULTS, 100, Caller(reasoning_end=served))
    assert (params.structured_outputs, params.skip_special_tokens) == (found, expected is None)


def test_what_is_free_stays_free_of_it() -> None:
    asked = ChatRequest.model_validate(CHAT | {"reasoning_end": "</think>"})
    assert structured(asked, Reading(), "</other>") is None
    assert sampling(asked, DEFAULTS, 100, Caller(reasoning_end="</other>")).skip_special_tokens


def test_completions_have_it_too() -> None:
    asked = CompletionRequest.model_validate({"prompt": "x", "structured_outputs": {"regex": "a"}})
    assert structured(asked, Reading()) == StructuredOutputs(regex="a")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"response_format": OF_SCHEMA, "structured_outputs": {"regex": "a"}}, "each say what the text must be"),
        ({"response_format": OF_SCHEMA, "tools": TOOLS, "tool_choice": "required"}, "each say what the text must be"),
        ({"response_format": {"type": "json_schema"}}, r"needs json_schema\.schema"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "whitespace_pattern is not supported"),
        ({"structured_outputs": {}}, "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "regex and choice"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises((ApiError, OptionError), match=told):
        of(**fields)


def text_of(client: TestClient, **fields: Any) -> str:
    """Of a chat, the same whole and streamed, with speculation and without."""
    texts = set()
    for more in ({}, {"speculation": "off"}, {"stream": True}):
        answer = client.post("/v1/chat/completions", json=CHAT | fields | more)
        assert answer.status_code == 200, answer.text
        if "stream" in more:
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            texts.add("".join(event["choices"][0]["delta"].get("content") or "" for event in events))
        else:
            texts.add(answer.json()["choices"][0]["message"]["content"])
    (text,) = texts
    return str(text)


def test_texts_are_what_was_asked_for(client: TestClient) -> None:
    jsonschema.validate(json.loads(text_of(client, response_format=OF_SCHEMA)), SCHEMA)
    jsonschema.validate(json.loads(text_of(client, structured_outputs={"json": json.dumps(SCHEMA)})), SCHEMA)
    assert text_of(client, structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    assert re.fullmatch("[a-f]{4}-[0-9]{2}", text_of(client, structured_outputs={"regex": "[a-f]{4}-[0-9]{2}"}))
    assert text_of(client, structured_outputs={"grammar": 'start: "ab" "cd"'}) == "abcd"
    answer = client.post("/v1/completions", json={"prompt": "x", "structured_outputs": {"choice": ["abc"]}})
    assert answer.json()["choices"][0]["text"] == "abc"
    assert answer.json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("speculation", ["auto", "off", "best:8"])
def test_a_server_s_structures_begin_after_its_reasoning(
    make_client: Callable[..., TestClient], engine: Engine, speculation: str
) -> None:
    """The bias makes the token come, which a text of this pair has no other reason to say."""
    client, token = make_client(reasoning_end="return"), engine.tokenizer.token_id("return")
    asked = CHAT | {"response_format": OF_SCHEMA, "logit_bias": {str(token): 9}, "speculation": speculation}
    _, end, text = text_of(client, **asked).partition("return")
    assert end
    jsonschema.validate(json.loads(text), SCHEMA)
    jsonschema.validate(json.loads(text_of(client, **asked, reasoning_end="")), SCHEMA)
    own = {"structured_outputs": {"choice": ["yes"], "after": "class"}, "response_format": None}
    bias = {"logit_bias": {str(engine.tokenizer.token_id("class")): 30}}
    assert text_of(client, **asked | own | bias).partition("class")[1:] == ("class", "yes")


def test_an_object_that_is_cut_off_says_so(client: TestClient) -> None:
    answer = client.post("/v1/chat/completions", json=CHAT | {"response_format": OF_SCHEMA, "max_tokens": 4}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"].startswith('{"name"')


def test_samples_each_have_their_own(client: TestClient) -> None:
    asked = CHAT | {"response_format": OF_SCHEMA, "n": 3, "temperature": 1, "seed": 5}
    for choice in client.post("/v1/chat/completions", json=asked).json()["choices"]:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"regex": "a("}, "unclosed group"),
        ({"json": {"not": {"type": "string"}}}, 'Unimplemented keys: ["not"]: leave it out'),
        ({"json": {"$ref": "https://example.com/a.json"}}, "which is not fetched"),
        ({"json": {"$ref": "#"}}, "cannot be used"),
        ({"json": {"type": "colour"}}, "cannot be used"),
        ({"json": {"enum": []}}, "cannot be used"),
        ({"json": json.dumps({"d": "x" * 300_000})}, "give a smaller one"),
        ({"json": '{"items":' * 500 + "{}" + "}" * 500}, "json"),
        ({"grammar": "start: nothing"}, "cannot be used"),
        ({"json_object": True, "after": "</nothing>"}, "no token of this model"),
    ],
)
def test_hostile_and_wrong_ones_are_400s_in_a_line(client: TestClient, fields: dict[str, Any], told: str) -> None:
    answer = client.post("/v1/chat/completions", json=CHAT | {"structured_outputs": fields})
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert told in message
    assert "\n" not in message
    assert len(message) < 1000


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"min_tokens": 9, "structured_outputs": {"choice": ["a", "b"]}}, "before min_tokens"),
        ({"min_tokens": 30, "structured_outputs": {"regex": "[ab]{2,4}"}}, "before min_tokens"),
    ],
)
@pytest.mark.parametrize("speculation", ["off", "auto", "chain:4"])
def test_a_contradiction_is_the_caller_s(
    client: TestClient, fields: dict[str, Any], told: str, speculation: str, stream: bool
) -> None:
    answer = client.post("/v1/chat/completions", json=CHAT | fields | {"speculation": speculation, "stream": stream})
    assert answer.status_code == (200 if stream else 400), answer.text
    line = answer.text.removesuffix("data: [DONE]\n\n").strip().splitlines()[-1].removeprefix("data: ")
    error = json.loads(line)["error"]
    assert told in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == "structured_outputs"


@pytest.mark.parametrize("speculation", ["off", "auto", "chain:4"])
def test_a_literal_may_have_a_special_token_s_name(client: TestClient, speculation: str) -> None:
    for literal in ("<|endoftext|>", "a<|endoftext|>b", "<|endoftext|><|endoftext|>"):
        for outputs in ({"choice": [literal]}, {"json": {"const": literal}}, {"json": {"enum": [literal]}}):
            said = text_of(client, **CHAT, structured_outputs=outputs, speculation=speculation)
            assert said == (literal if "choice" in outputs else json.dumps(literal))


def test_a_receipt_says_it(client: TestClient) -> None:
    asked = CHAT | {"response_format": OF_SCHEMA, "receipt": True}
    (choice,) = client.post("/v1/chat/completions", json=asked).json()["choices"]
    assert choice["receipt"]["parameters"]["structured_outputs"] == {"json": json.dumps(SCHEMA)}
