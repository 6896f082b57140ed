"""/v1/responses and /v1/messages from a client's side: the chat's texts and calls, conversations, keys, cancelling."""

import asyncio
import json
import time

import pytest
from asgi import GONE, part, scope_of
from route_client import CHATS, MESSAGES, RESPONSES, SAID, SCHEMA

TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
CALLS = {  # by route, what makes it call the tool
    RESPONSES: {"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}, "max_output_tokens": 60},
    MESSAGES: {
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "weather"},
        "max_tokens": 60,
    },
}
A, B = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
REQUIRED = """id object created_at completed_at status incomplete_details model previous_response_id instructions output
error tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs
temperature reasoning usage max_output_tokens max_tool_calls store background service_tier metadata safety_identifier
prompt_cache_key"""  # of a response, by Open Responses' schema


def shape(body):
    return [item.get("content") or (item["name"], item["arguments"]) for item in body["output"]]


@pytest.mark.slow
def test_a_response_is_the_chats_text(client):
    said, body, events = client.choice(CHATS)["text"], client.ask(RESPONSES), client.events(RESPONSES)
    assert body["output"][0]["content"][0]["text"] == said
    assert (body["object"], body["status"], body["usage"]["output_tokens"]) == ("response", "incomplete", 12)
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == said
    assert events[-1]["type"] == "response.incomplete"
    assert shape(events[-1]["response"]) == shape(body)


@pytest.mark.slow
def test_a_response_has_every_field_that_open_responses_requires(client):
    """It says what was asked; numbers say how tokens were chosen, also where that was left to the model."""
    asked = {"metadata": {"a": "b"}, "instructions": "brief", "user": "me", "temperature": None}
    whole = client.ask(RESPONSES, **asked)
    del asked["temperature"]
    assert asked.items() <= whole.items()
    assert whole["metrics"]["speculative_decoding"]
    numbers = ("top_p", "presence_penalty", "frequency_penalty", "top_logprobs", "temperature")
    for body in (whole, *(event["response"] for event in client.events(RESPONSES) if "response" in event)):
        assert set(REQUIRED.split()) <= body.keys()
        assert all(isinstance(body[name], int | float) for name in numbers)
        assert body["completed_at"] is None, "a limit ended it"
    called = client.ask(RESPONSES, **CALLS[RESPONSES], top_p=0.5)
    assert (called["status"], called["temperature"], called["top_p"]) == ("completed", 0, 0.5)
    assert called["created_at"] <= called["completed_at"] <= time.time()


def test_a_conversation_goes_on_and_can_be_deleted(client):
    first = client.ask(RESPONSES)
    path, more = f"{RESPONSES}/{first['id']}", {"input": "and then", "previous_response_id": first["id"]}
    assert client.get(path).json() == first
    second, said = client.ask(RESPONSES, **more), first["output"][0]["content"][0]["text"]
    whole = [*SAID, {"role": "assistant", "content": said}, {"role": "user", "content": "and then"}]
    assert shape(client.ask(RESPONSES, input=whole)) == shape(second)
    assert client.get(f"{RESPONSES}/{second['id']}/input_items").json()["data"][0]["content"] == "and then"
    assert client.delete(path).json()["deleted"]
    assert client.get(path).status_code == 404
    status, error = client.refusal(RESPONSES, **more)
    assert (status, error["param"]) == (404, "previous_response_id")
    assert client.get(f"{RESPONSES}/{client.ask(RESPONSES, store=False)['id']}").status_code == 404


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_no_other_key_reads_goes_on_with_cancels_or_deletes_it(make_client, background):
    with make_client(api_keys=("a", "b")) as client:  # one loop for all requests
        asked = {"input": "x", "background": background, "max_output_tokens": 200}
        number = client.post(RESPONSES, json=asked, headers=A).json()["id"]
        path, more = f"{RESPONSES}/{number}", {"input": "x", "previous_response_id": number}
        for method, way, body in (
            *(("GET", path, None), ("DELETE", path, None), ("POST", f"{path}/cancel", None), ("POST", RESPONSES, more)),
        ):
            assert client.request(method, way, json=body, headers=B).status_code == 404
        assert client.get(path, headers=A).status_code == 200


def test_one_in_the_background_is_polled_and_cancelled(client):
    with client:
        path = f"{RESPONSES}/{client.ask(RESPONSES, background=True)['id']}"
        while (body := client.get(path).json())["status"] == "in_progress":
            time.sleep(0.01)
        assert shape(body) == shape(client.ask(RESPONSES))
        assert client.post(f"{path}/cancel").status_code == 400
        path = f"{RESPONSES}/{client.ask(RESPONSES, background=True, max_output_tokens=900)['id']}"
        reply = client.post(f"{path}/cancel")
        if reply.status_code == 200:  # else it had ended before
            assert reply.json()["status"] == client.get(path).json()["status"] == "cancelled"


def test_one_in_the_background_needs_no_client(client):
    """It goes on where its client left before the first token."""
    body = part(json.dumps({"input": "x", "background": True, "max_output_tokens": 8}).encode())

    async def ask(scope, *messages):
        left, sent = list(messages), list[bytes]()

        async def receive():
            return left.pop(0) if left else GONE

        async def send(message):
            sent.append(message.get("body", b""))

        await client.app(scope, receive, send)
        return json.loads(b"".join(sent))

    async def run():
        found = await ask(scope_of("POST", RESPONSES, content_type="application/json"), body)
        while found["status"] == "in_progress":
            await asyncio.sleep(0.01)
            found = await ask(scope_of("GET", f"{RESPONSES}/{found['id']}"), part(b""))
        return found

    found = asyncio.run(asyncio.wait_for(run(), 60))
    assert (found["status"], found["usage"]["output_tokens"]) == ("incomplete", 8)


def test_a_message_is_the_chats_text(client):
    said, body, events = client.choice(CHATS)["text"], client.ask(MESSAGES), client.events(MESSAGES)
    assert body["content"] == [{"type": "text", "text": said}]
    assert (body["type"], body["role"], body["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert body["usage"]["output_tokens"] == 12
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == said
    ends = [event["type"] for event in (events[0], *events[-3:])]
    assert ends == ["message_start", "content_block_stop", "message_delta", "message_stop"]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    counted = client.ask(f"{MESSAGES}/count_tokens", messages=SAID)["input_tokens"]
    assert counted == body["usage"]["input_tokens"] + body["usage"]["cache_read_input_tokens"] > 0
    stopped = client.ask(MESSAGES, stop_sequences=[said[3:6]])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", said[3:6])


def test_a_response_calls_a_tool(client):
    body, events = client.ask(RESPONSES, **CALLS[RESPONSES]), client.events(RESPONSES, **CALLS[RESPONSES])
    (call,) = body["output"]
    assert (call["type"], call["name"], body["status"]) == ("function_call", "weather", "completed")
    assert json.loads(call["arguments"])["city"] in ("Rome", "Oslo")
    deltas = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert ("".join(deltas), events[-1]["type"]) == (call["arguments"], "response.completed")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
    assert client.ask(RESPONSES, input=[output], previous_response_id=body["id"])


def test_a_message_calls_a_tool(client):
    body, events = client.ask(MESSAGES, **CALLS[MESSAGES]), client.events(MESSAGES, **CALLS[MESSAGES])
    (call,) = body["content"]
    assert (call["type"], call["name"], body["stop_reason"]) == ("tool_use", "weather", "tool_use")
    assert call["input"]["city"] in ("Rome", "Oslo")
    deltas = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert json.loads("".join(deltas)) == call["input"]
    cut = client.ask(MESSAGES, **CALLS[MESSAGES] | {"max_tokens": 1})
    assert (cut["content"][0]["input"], cut["stop_reason"]) == ({}, "max_tokens")


@pytest.mark.parametrize(("key", "status"), [("secret", 200), ("other", 401)])
def test_a_key_may_come_by_anthropics_header(make_client, key, status):
    body = {"messages": SAID, "max_tokens": 1}
    reply = make_client(api_keys=("secret",)).post(MESSAGES, json=body, headers={"x-api-key": key})
    assert reply.status_code == status
