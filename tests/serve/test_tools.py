"""Calls of tools: their arguments obey their schemas, and texts are told from calls, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from fastapi.testclient import TestClient
from turn_texts import whole

from specbuild.runtime import Engine, SamplingParams
from specbuild.serve.errors import ApiError
from specbuild.serve.fields import ChatRequest
from specbuild.serve.tools import deltas, described, parser, read_back, structured
from specbuild.serve.turns.pieces import Piece
from specbuild.serve.turns.reading import Reading

PLACE = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
}
OTHER = {
    **PLACE,
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "$defs": {"city": {"const": "x"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE, "strict": True}},
    {"type": "function", "function": {"name": "stop"}},
    {"type": "function", "function": {"name": "other", "parameters": OTHER}},
]
SCHEMAS: dict[str, Any] = {"weather": PLACE, "other": OTHER, "stop": {"type": "object", "maxProperties": 0}}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "temperature": 0, "tools": TOOLS}
NAMED = {"type": "function", "function": {"name": "weather"}}


def body(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate(CHAT | fields)


def test_a_template_reads_the_tools() -> None:
    told = described(body())
    assert told
    assert told[0] == {"type": "function", "function": TOOLS[0]["function"]}
    assert described(body(tool_choice="none")) is None
    assert described(body(tools=None)) is None


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nothing"}}}, "which is no tool"),
        ({"tools": None, "tool_choice": "required"}, "needs tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "the same name"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ApiError, match=told):
        structured(body(**fields), Reading())


@pytest.mark.parametrize(
    ("fields", "text", "content", "called"),
    [
        ({}, '<tool_call>{"name": "a", "arguments": {"b": 1}}', "", ["a"]),
        ({"tool_choice": "none"}, '<tool_call>{"name": "a"}', '<tool_call>{"name": "a"}', []),
        ({"tool_choice": "required"}, '[{"name":"stop","arguments":{}}]', "", ["stop"]),
        ({"tool_choice": NAMED}, '{"city":"Rome"', "", ["weather"]),
    ],
)
def test_who_reads_a_text(fields: dict[str, Any], text: str, content: str, called: list[str]) -> None:
    turn = whole(parser(body(**fields), Reading()), text)
    assert (turn.content, [call.name for call in turn.calls]) == (content, called)


def test_deltas_are_of_openais_shape() -> None:
    told = deltas([Piece("call", "f"), Piece("arguments", "{"), Piece("arguments", "}"), Piece("call", "g", 1)])
    assert [call["function"] for call in told] == [{"name": "f", "arguments": "{}"}, {"name": "g", "arguments": ""}]
    assert [call["index"] for call in told] == [0, 1]
    assert told[0]["id"] != told[1]["id"]
    assert deltas([Piece("arguments", "}", 1)]) == [{"index": 1, "function": {"arguments": "}"}}]


def test_what_comes_back_has_objects_for_arguments() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert read_back([call])[0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert read_back([{"id": "1"}]) == [{"id": "1"}]
    with pytest.raises(ApiError, match="no JSON object"):
        read_back([{"function": {"name": "f", "arguments": '{"a'}}])


@pytest.mark.parametrize(
    ("reading", "told"),
    [(Reading("mistral"), "strict tool needs"), (Reading(auto_tool_choice=False), "tool_choice auto is off")],
)
def test_what_a_form_cannot_do_is_refused(reading: Reading, told: str) -> None:
    with pytest.raises(ApiError, match=told):
        structured(body(), reading)
    assert structured(body(tool_choice="required"), reading)


def test_a_strict_call_in_llamas_form(engine: Engine) -> None:
    """A text that begins as a call is one, and its arguments obey; any other text is free."""
    outputs = structured(body(), Reading("llama3_json"))
    assert outputs
    assert outputs.grammar
    brace = engine.tokenizer.token_id("{")
    assert brace is not None
    params = SamplingParams(max_new_tokens=60, structured_outputs=outputs, logit_bias={brace: 100})
    (call,) = whole(parser(body(), Reading("llama3_json")), engine.generate("x", params)[0].text).calls[:1]
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


def streamed(client: TestClient, **fields: Any) -> tuple[str, list[Any], str]:
    """Content, calls, and why it ended; the calls are put together."""
    lines = client.post("/v1/chat/completions", json=CHAT | fields | {"stream": True}).text.splitlines()
    parts = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    content = "".join(part["delta"].get("content") or "" for part in parts)
    made: list[Any] = []
    for call in (call for part in parts for call in part["delta"].get("tool_calls", ())):
        if call["index"] == len(made):
            made.append(call)
        else:
            made[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return content, made, parts[-1]["finish_reason"]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_was_asked_for_obeys_its_schema(client: TestClient, choice: Any, temperature: float) -> None:
    fields = {"tool_choice": choice, "parallel_tool_calls": False, "temperature": temperature, "seed": 4}
    (whole,) = client.post("/v1/chat/completions", json=CHAT | fields).json()["choices"]
    (call,) = whole["message"]["tool_calls"]
    assert (whole["message"]["content"], whole["finish_reason"]) == (None, "tool_calls")
    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    jsonschema.validate(arguments, SCHEMAS[name])
    content, (other,), reason = streamed(client, **fields)
    assert (content, other["function"], other["index"], reason) == ("", call["function"], 0, "tool_calls")


def test_a_limit_cuts_calls_and_makes_no_content_of_them(client: TestClient, engine: Engine) -> None:
    """Whole and streamed: what comes is calls alone, until the last that a limit cuts."""
    bias = {str(engine.tokenizer.token_id(text)): amount for text, amount in ((",", 20), ("]", -20))}  # several calls
    fields = {"tool_choice": "required", "temperature": 1, "seed": 4, "logit_bias": bias}
    lengths = set()
    for length in range(1, 64, 9):
        asked = fields | {"max_tokens": length}
        (whole,) = client.post("/v1/chat/completions", json=CHAT | asked).json()["choices"]
        message, functions = whole["message"], [call["function"] for call in whole["message"].get("tool_calls", ())]
        assert not message["content"]
        assert whole["finish_reason"] in ("length", "tool_calls")
        content, made, reason = streamed(client, **asked)
        assert (content, [call["function"] for call in made], reason) == ("", functions, whole["finish_reason"])
        lengths.add((len(functions), whole["finish_reason"]))
    assert {reason for _, reason in lengths} == {"length"}
    assert max(lengths)[0] > 1


def test_a_server_s_calls_come_after_its_reasoning(make_client: Any, engine: Any) -> None:
    """Whole and streamed; the bias makes the token come that ends it."""
    client, token = make_client(reasoning_end="return"), engine.tokenizer.token_id("return")
    fields = {"tool_choice": NAMED, "logit_bias": {str(token): 9}}
    (whole,) = client.post("/v1/chat/completions", json=CHAT | fields).json()["choices"]
    (call,) = whole["message"]["tool_calls"]
    assert whole["message"]["content"].endswith("return")
    jsonschema.validate(json.loads(call["function"]["arguments"]), PLACE)
    content, (other,), reason = streamed(client, **fields)
    assert (content, other["function"], reason) == (whole["message"]["content"], call["function"], "tool_calls")


def test_a_free_text_may_call_and_is_parsed(client: TestClient) -> None:
    """A strict tool's call begins by its tag, from where on it is held to the schema; here the text is made to."""
    outputs = structured(body(), Reading())
    assert outputs
    assert "<tool_call>" in str(outputs.structural_tag)
    answer = client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")
    assert streamed(client)[0] == answer.json()["choices"][0]["message"]["content"]


def test_the_reasoning_of_a_parser_is_apart(make_client: Any, engine: Engine) -> None:
    """Whole and streamed, with speculation and without; the end comes in the middle of what a chunk has."""
    client, token = make_client(reading=Reading(reasoning_parser="def,return")), engine.tokenizer.token_id("return")
    fields = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 24, "temperature": 0}
    fields |= {"chat_template_kwargs": {"prefix": "def"}, "logit_bias": {str(token): 9}}
    for more in ({}, {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 80}):
        told = []
        for speculation in ("off", "chain:7"):
            asked = fields | more | {"speculation": speculation}
            message = client.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]
            lines = client.post("/v1/chat/completions", json=asked | {"stream": True}).text.splitlines()
            deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
            for name in ("reasoning_content", "content"):
                assert "".join(each.get(name) or "" for each in deltas) == (message.get(name) or "")
            calls = [call["function"] for call in message.get("tool_calls", ())]
            told.append((message["reasoning_content"], message["content"], calls))
        assert told[0] == told[1]
        assert told[0][0]
        assert "return" not in told[0][0]
        assert told[0][1] or told[0][2]


def test_a_conversation_goes_on_after_a_call(client: TestClient) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "stop", "arguments": "{}"}}
    messages = [
        *({"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}),
        {"role": "tool", "content": "done", "tool_call_id": "call_1"},
    ]
    assert client.post("/v1/chat/completions", json=CHAT | {"messages": messages}).status_code == 200
