"""Calls of tools: their arguments obey their schemas, and texts are told from calls, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from specbuild.serve.errors import ApiError
from specbuild.serve.fields import ChatRequest
from specbuild.serve.tools import calls, described, shown, structured

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
        structured(body(**fields))


@pytest.mark.parametrize(
    ("text", "fields", "content", "called"),
    [
        ("plain", {}, "plain", []),
        ('Yes.\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>', {}, "Yes.\n", ["stop"]),
        (
            '<tool_call>{"name": "a", "arguments": {"b": 1}}</tool_call><tool_call>{"name": "c", "arguments": {}}',
            {},
            "",
            ["a", "c"],
        ),
        ("<tool_call>{broken</tool_call>", {}, "<tool_call>{broken</tool_call>", []),
        ('<tool_call>{"name": "st', {}, '<tool_call>{"name": "st', []),
        ("<tool_call>3</tool_call>", {}, "<tool_call>3</tool_call>", []),
        ('<tool_call>{"name": "stop"}', {"tool_choice": "none"}, '<tool_call>{"name": "stop"}', []),
        ('[{"name":"stop","arguments":{}}]', {"tool_choice": "required"}, "", ["stop"]),
        ('[{"name":"stop","argum', {"tool_choice": "required"}, '[{"name":"stop","argum', []),
        ('{"city":"Rome"', {"tool_choice": NAMED}, "", ["weather"]),
    ],
)
def test_texts_and_calls(text: str, fields: dict[str, Any], content: str, called: list[str]) -> None:
    found, made = calls(text, body(**fields))
    assert found == content
    assert [call["function"]["name"] for call in made] == called
    assert len({call["id"] for call in made}) == len(made)


@pytest.mark.parametrize(
    ("text", "fields", "content", "called"),
    [
        ('So.</think>[{"name":"stop","arguments":{}}]', {"tool_choice": "required"}, "So.</think>", ["stop"]),
        ('So.</think>{"city":"</think>"}', {"tool_choice": NAMED}, "So.</think>", ["weather"]),
        (
            '<tool_call></think>Yes.<tool_call>{"name": "stop", "arguments": {}}',
            {},
            "<tool_call></think>Yes.",
            ["stop"],
        ),
        ('<tool_call>{"name": "stop"}', {}, '<tool_call>{"name": "stop"}', []),
        ('[{"name":"stop"', {"tool_choice": "required"}, '[{"name":"stop"', []),
        ('So.</think>[{"na', {"tool_choice": "required"}, 'So.</think>[{"na', []),
        ("a</think>b", {"tool_choice": "none"}, "a</think>b", []),
    ],
)
def test_a_reasoning_is_content_and_has_no_calls(
    text: str, fields: dict[str, Any], content: str, called: list[str]
) -> None:
    """Calls come after its end; a text that never ends it is all reasoning."""
    found, made = calls(text, body(**fields), "</think>")
    assert (found, [call["function"]["name"] for call in made]) == (content, called)
    assert found.startswith(shown(text, body(**fields), ended=False, after="</think>"))


@pytest.mark.parametrize("after", [None, "</think>"])
@given(text=st.lists(st.sampled_from(["<tool_call>", "<tool", "</think>", "a", "<", "\n"]), max_size=8).map("".join))
def test_what_is_shown_only_grows_and_ends_as_the_whole(text: str, after: str | None) -> None:
    asked, before = body(), ""
    for end in range(len(text) + 1):
        now = shown(text[:end], asked, ended=False, after=after)
        assert now.startswith(before)
        before = now
    assert shown(text, asked, ended=True, after=after).startswith(before)


def streamed(client: TestClient, **fields: Any) -> tuple[str, list[Any], str]:
    lines = client.post("/v1/chat/completions", json=CHAT | fields | {"stream": True}).text.splitlines()
    parts = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    content = "".join(part["delta"].get("content") or "" for part in parts)
    made = [call for part in parts for call in part["delta"].get("tool_calls", ())]
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
    outputs = structured(body())
    assert outputs
    assert "<tool_call>" in str(outputs.structural_tag)
    answer = client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")
    assert streamed(client)[0] == answer.json()["choices"][0]["message"]["content"]


def test_a_conversation_goes_on_after_a_call(client: TestClient) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "stop", "arguments": "{}"}}
    messages = [
        *({"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}),
        {"role": "tool", "content": "done", "tool_call_id": "call_1"},
    ]
    assert client.post("/v1/chat/completions", json=CHAT | {"messages": messages}).status_code == 200
