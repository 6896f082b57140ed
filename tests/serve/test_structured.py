"""What a text has to be, by OpenAI's field, by vLLM's, and by a call of a tool."""

import json
import re

import jsonschema
import pytest
from data_files import rows
from route_client import CHATS, COMPLETIONS, SAID, SCHEMA

from specbuild.serve.output_parsers.reading import Reading
from specbuild.serve.request.body import converted
from specbuild.serve.request.fields import ChatRequest
from specbuild.serve.request.grammars import GrammarCompiler
from specbuild.serve.request.parameters import DEFAULTS, Caller, sampling
from specbuild.serve.request.structured import structured

OF_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("told", rows("structured_bodies.jsonl"))
def test_what_is_asked_for_and_after_which_token_it_begins(told):
    """The request's own token goes before the server's."""
    body, served = converted(ChatRequest, {"messages": SAID} | told["fields"]), told["reasoning_end"]
    found = structured(body, Reading(), served)
    assert (found and found.to_dict()) == told["structured"]
    params = sampling(body, DEFAULTS, 100, Caller(reasoning_end=served))
    assert params.structured_outputs == found
    assert params.skip_special_tokens == (not found or found.after is None)


def text_of(client, path=CHATS, **fields):
    """The same whole and streamed, with speculation and without."""
    (text,) = {client.choice(path, **{"max_tokens": 40} | fields | way)["text"] for way in ({}, {"speculation": "off"})}
    return str(text)


def test_texts_are_what_was_asked_for(client):
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


def test_a_grammar_that_is_known_is_not_compiled_again(client, monkeypatch):
    asked = {"structured_outputs": {"regex": "[a-f]{7}"}}
    text = client.choice(**asked)["text"]
    monkeypatch.setattr(GrammarCompiler, "constraint", None)
    assert client.choice(**asked)["text"] == text
