"""Calls of tools: their arguments obey their schemas, and texts are told from calls, whole and streamed."""

import json

import jsonschema
import pytest
from route_client import CHATS, SAID, SCHEMA
from turn_texts import whole

from specbuild.runtime import SamplingParams
from specbuild.serve.errors import ApiError
from specbuild.serve.output_parsers.reading import Reading
from specbuild.serve.request.body import converted
from specbuild.serve.request.fields import ChatRequest
from specbuild.serve.request.tools import described, parser, read_back, structured

OTHER = SCHEMA | {"properties": {"city": {"const": "x"}}, "required": ["city"]}
SCHEMAS = {"weather": SCHEMA, "other": OTHER, "stop": {"type": "object", "maxProperties": 0}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "stop"}},
    {"type": "function", "function": {"name": "other", "parameters": OTHER}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


def body(**fields):
    return converted(ChatRequest, {"messages": SAID, "tools": TOOLS} | fields)


def choice(client, **fields):
    """The same whole and streamed."""
    return client.choice(CHATS, **{"tools": TOOLS, "max_tokens": 60} | fields)


def test_a_template_reads_the_tools_and_a_strict_one_s_call_is_held_to_its_schema():
    assert (described(body()) or [None])[0] == TOOLS[0]
    assert described(body(tool_choice="none")) is described(body(tools=None)) is None
    assert "<tool_call>" in str(structured(body(), Reading()))


@pytest.mark.parametrize(
    ("choice", "text", "content", "called"),
    [
        (None, '<tool_call>{"name": "a", "arguments": {"b": 1}}', "", ["a"]),
        ("none", '<tool_call>{"name": "a"}', '<tool_call>{"name": "a"}', []),
        ("required", '[{"name":"stop","arguments":{}}]', "", ["stop"]),
        (NAMED, '{"city":"Rome"', "", ["weather"]),
    ],
)
def test_who_reads_a_text(choice, text, content, called):
    turn = whole(parser(body(tool_choice=choice), Reading()), text)
    assert (turn.content, [call.name for call in turn.calls]) == (content, called)


@pytest.mark.slow
def test_what_comes_back_has_objects_for_arguments(client):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert read_back([call])[0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert read_back([{"id": "1"}]) == [{"id": "1"}]
    with pytest.raises(ApiError, match="no JSON object"):
        read_back([{"function": {"name": "f", "arguments": '{"a'}}])
    said = [*SAID, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert choice(client, messages=[*said, {"role": "tool", "content": "done", "tool_call_id": "1"}])


@pytest.mark.parametrize(
    ("reading", "told"),
    [(Reading("mistral"), "strict tool needs"), (Reading(auto_tool_choice=False), "tool_choice auto is off")],
)
def test_what_a_form_cannot_do_is_refused(reading, told):
    with pytest.raises(ApiError, match=told):
        structured(body(), reading)
    assert structured(body(tool_choice="required"), reading)


def test_a_strict_call_in_llamas_form(engine):
    """A text that begins as a call is one, and its arguments obey; any other text is free."""
    outputs, brace = structured(body(), Reading("llama3_json")), engine.tokenizer.token_id("{")
    assert outputs
    assert outputs.grammar
    params = SamplingParams(max_new_tokens=60, structured_outputs=outputs, logit_bias={brace or 0: 100})
    (call,) = whole(parser(body(), Reading("llama3_json")), engine.generate("x", params)[0].text).calls[:1]
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


def test_the_reasoning_of_a_parser_is_apart(make_client, engine):
    """With speculation and without; the end comes in the middle of what a chunk has."""
    client, token = make_client(reading=Reading(reasoning_parser="def,return")), engine.tokenizer.token_id("return")
    fields = {"chat_template_kwargs": {"prefix": "def"}, "logit_bias": {str(token): 9}}
    for more in ({"tools": None, "max_tokens": 24}, {"tool_choice": NAMED, "max_tokens": 80}):
        told, drafted = (choice(client, **fields | more, speculation=way) for way in ("off", "chain:7"))
        assert told == drafted
        assert told["reasoning"]
        assert "return" not in told["reasoning"]
        assert told["text"] or told["calls"]
    begin = {str(engine.tokenizer.token_id("def")): 100}
    told = choice(client, tools=None, max_tokens=2, chat_template_kwargs={"prefix": "return"}, logit_bias=begin)
    assert (told["reasoning"], told["text"]) == ("", "defdef"), "the prompt has ended it"
