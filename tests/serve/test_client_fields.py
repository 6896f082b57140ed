"""Fields that clients send: taken where they change nothing, followed where they change the text, else refused."""

import json

import pytest
from route_client import ASKED, CHATS, COMPLETIONS, MESSAGES, RESPONSES, SAID, SCHEMA, RouteClient
from serving import CHAT_TEMPLATE

from specbuild.runtime import Engine

NOTHING = {"service_tier": "auto", "safety_identifier": "u", "prompt_cache_key": "k"}
STORED = {"metadata": {"a": "b"}, "store": False}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}} for name in ("one", "two")
]


def tool(name):
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_what_changes_nothing_is_taken(client, path):
    assert client.choice(path, **NOTHING, **STORED) == client.choice(path)
    assert client.refusal(path, **ASKED[path], store=True)[1]["param"] == "store"


def test_responses_and_messages_take_them_too(client):
    asked = {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}
    texts = [client.ask(RESPONSES, **more)["output"][0]["content"] for more in ({}, NOTHING | STORED | asked)]
    assert texts[0] == texts[1]
    assert client.ask(MESSAGES, **NOTHING, thinking={"type": "disabled"})["content"]


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        *((CHATS, {"reasoning_effort": "low"}, "reasoning_effort"), (CHATS, {"verbosity": "low"}, "verbosity")),
        (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
    ],
)
def test_what_no_template_reads_is_refused_by_its_name(client, path, fields, name):
    base = {"input": "x"} if path == RESPONSES else {"messages": SAID}
    status, error = client.refusal(path, **base, **fields)
    assert (status, error["param"]) == (400, name)
    assert error["message"].startswith(name)


def test_thinking_that_no_template_reads_is_refused_unless_the_model_may_leave_it(client):
    asked = {"messages": SAID, "max_tokens": 4}
    status, error = client.refusal(MESSAGES, **asked, thinking={"type": "enabled", "budget_tokens": 1024})
    assert (status, error["message"].startswith("thinking")) == (400, True)
    assert client.ask(MESSAGES, **asked, thinking={"type": "adaptive"})["content"]


@pytest.mark.parametrize("kind", ["custom", "web_search"])
@pytest.mark.parametrize("path", [CHATS, RESPONSES])
def test_tools_that_are_no_functions_are_refused_and_the_error_says_so(client, path, kind):
    status, error = client.refusal(path, **ASKED[path], tools=[{"type": kind, "name": "f", kind: {"name": "f"}}])
    assert (status, error["param"]) == (400, "tools.0.type")
    assert kind in error["message"]
    assert "tools here are functions" in error["message"]


def test_an_output_format_is_followed(client):
    asked = {"max_tokens": 60, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    (block,) = client.ask(MESSAGES, **asked)["content"]
    assert json.loads(block["text"])["city"] in ("Rome", "Oslo")


def test_a_template_reads_them(make_client, bundle, log):
    template = CHAT_TEMPLATE + "#{{ reasoning_effort }}#{{ verbosity }}#{{ enable_thinking }}#"
    with Engine.load(bundle, chat_template=template) as engine:
        from route_client import service_of

        client = RouteClient(service_of(engine, bundle, log), log)
        plain = len(client.ask("/tokenize", messages=SAID)["tokens"])
        for path, fields in (
            (CHATS, {"reasoning_effort": "low"}),
            (CHATS, {"verbosity": "high"}),
            (RESPONSES, {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}}),
            (MESSAGES, {"thinking": {"type": "enabled"}}),
        ):
            usage = client.ask(path, **fields)["usage"]
            read = usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
            assert read > plain, path


def test_a_developer_is_the_system(client):
    said = [[{"role": role, "content": "be brief"}, *SAID] for role in ("developer", "system")]
    one, other = (client.ask("/tokenize", messages=each)["tokens"] for each in said)
    assert one == other


def test_a_prompt_cache_key_keeps_caches_apart(client):
    def cached(**fields):
        usage = client.ask(prompt="import sys\nimport json\n" * 8, max_tokens=1, **fields)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(prompt_cache_key=key) > 0 for key in "aab"] == [False, True, False]


def test_allowed_tools_are_a_subset(client):
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tool("two")]}}
        asked = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 60}
        assert client.choice(CHATS, **asked) == client.choice(CHATS, tools=TOOLS[1:], tool_choice=mode, max_tokens=60)
    wrong = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("three")]}}
    assert client.refusal(CHATS, messages=SAID, tools=TOOLS, tool_choice=wrong)[1]["param"] == "tool_choice"
    flat = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("one", "two")]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "two"}]}
    (call,) = client.ask(RESPONSES, tools=flat, tool_choice=allowed, parallel_tool_calls=False, max_output_tokens=60)[
        "output"
    ]
    assert call["name"] == "two"


def test_a_named_tool_ends_as_openai_says(client):
    asked = {"tools": TOOLS, "max_tokens": 60, "parallel_tool_calls": False}
    assert client.choice(CHATS, **asked, tool_choice=tool("one"))["finish_reason"] == "stop"
    assert client.choice(CHATS, **asked, tool_choice="required")["finish_reason"] == "tool_calls"


def test_what_clients_look_for_in_a_response(client, engine):
    fingerprint = f"fp_{engine.manifest.digest[:12]}"
    for path in (COMPLETIONS, CHATS):
        assert client.ask(path)["system_fingerprint"] == fingerprint
        assert {event["system_fingerprint"] for event in client.events(path)} == {fingerprint}
    reply = client.ask(CHATS)
    assert reply["choices"][0]["message"]["refusal"] is None
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("path", [COMPLETIONS, MESSAGES])
def test_errors_before_a_route_have_its_shape(make_client, path):
    client = make_client(api_keys=("k",))
    keyed = {"Authorization": "Bearer k", "Content-Type": "application/json"}
    replies = [client.post(path, json={}), client.post(path, content=bytes((8 << 20) + 1), headers=keyed)]
    assert [reply.status_code for reply in replies] == [401, 413]
    shapes = [reply.json().get("type") for reply in replies]
    kinds = [reply.json()["error"]["type"] for reply in replies]
    if path == MESSAGES:
        assert (shapes, kinds) == (["error"] * 2, ["authentication_error", "request_too_large"])
    else:
        assert (shapes, kinds) == ([None] * 2, ["invalid_request_error"] * 2)


def test_of_a_prompt_that_is_truncated_the_last_tokens_are_read(client):
    asked = {"prompt": "def main(argv):", "return_token_ids": True, "echo": True, "logprobs": 0}
    whole = client.ask(**asked)["choices"][0]["prompt_token_ids"]
    cut, last = (
        client.ask(**asked | more)["choices"] for more in ({"truncate_prompt_tokens": 2}, {"prompt": whole[-2:]})
    )
    assert cut[0]["prompt_token_ids"] == whole[-2:]
    assert [(each["text"], each["logprobs"]) for each in cut] == [(each["text"], each["logprobs"]) for each in last]
    assert client.ask(CHATS, truncate_prompt_tokens=2)["usage"]["prompt_tokens"] == 2
