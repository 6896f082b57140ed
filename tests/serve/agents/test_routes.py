"""/v1/responses from a client's side: shapes, streams, conversations, keys, cancelling."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

ASKED: dict[str, Any] = {"input": "a loop", "temperature": 0, "max_output_tokens": 12}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
A, B = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}


def streamed(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    lines = client.post("/v1/responses", json=ASKED | fields | {"stream": True}).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def shape(body: dict[str, Any]) -> list[Any]:
    return [item.get("content") or (item["name"], item["arguments"]) for item in body["output"]]


def test_a_text_is_the_chats(client: TestClient) -> None:
    chat = {"messages": [{"role": "user", "content": "a loop"}], "temperature": 0, "max_tokens": 12}
    said = client.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
    body = client.post("/v1/responses", json=ASKED).json()
    assert body["output"][0]["content"][0]["text"] == said
    assert (body["object"], body["status"]) == ("response", "incomplete")
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["usage"]["output_tokens"] == 12
    events = streamed(client)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == said
    assert events[-1]["type"] == "response.incomplete"
    assert shape(events[-1]["response"]) == shape(body)


REQUIRED = """id object created_at completed_at status incomplete_details model previous_response_id instructions output
error tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs
temperature reasoning usage max_output_tokens max_tool_calls store background service_tier metadata safety_identifier
prompt_cache_key"""  # of a response, by Open Responses' schema


def test_a_response_has_every_field_that_open_responses_requires(client: TestClient) -> None:
    """Numbers say how tokens were chosen, also where the request left that to the model."""
    whole = client.post("/v1/responses", json={"input": "a loop", "max_output_tokens": 2}).json()
    for body in (whole, *(event["response"] for event in streamed(client) if "response" in event)):
        assert set(REQUIRED.split()) <= body.keys()
        assert all(
            isinstance(body[name], int | float)
            for name in ("top_p", "presence_penalty", "frequency_penalty", "top_logprobs", "temperature")
        )
        assert body["completed_at"] is None, "a limit ended it"
    fields = {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 60, "top_p": 0.5}
    called = client.post("/v1/responses", json=ASKED | fields).json()
    assert (called["status"], called["temperature"], called["top_p"]) == ("completed", 0, 0.5)
    assert called["created_at"] <= called["completed_at"] <= time.time()


def test_a_call_is_an_item(client: TestClient) -> None:
    fields = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}, "max_output_tokens": 60}
    body = client.post("/v1/responses", json=ASKED | fields).json()
    (call,) = body["output"]
    assert (call["type"], call["name"], body["status"]) == ("function_call", "weather", "completed")
    assert json.loads(call["arguments"])["city"] in ("Rome", "Oslo")
    events = streamed(client, **fields)
    deltas = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert ("".join(deltas), events[-1]["type"]) == (call["arguments"], "response.completed")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
    again = client.post("/v1/responses", json=ASKED | {"input": [output], "previous_response_id": body["id"]})
    assert again.status_code == 200


def test_a_conversation_goes_on_and_can_be_deleted(client: TestClient) -> None:
    first = client.post("/v1/responses", json=ASKED).json()
    assert client.get(f"/v1/responses/{first['id']}").json() == first
    more = ASKED | {"input": "and then", "previous_response_id": first["id"]}
    second = client.post("/v1/responses", json=more).json()
    said = first["output"][0]["content"][0]["text"]
    whole = [{"role": "user", "content": "a loop"}, {"role": "assistant", "content": said}]
    same = client.post("/v1/responses", json=ASKED | {"input": [*whole, {"role": "user", "content": "and then"}]})
    assert shape(same.json()) == shape(second)
    assert client.get(f"/v1/responses/{second['id']}/input_items").json()["data"][0]["content"] == "and then"
    assert client.delete(f"/v1/responses/{first['id']}").json()["deleted"]
    assert client.get(f"/v1/responses/{first['id']}").status_code == 404
    gone = client.post("/v1/responses", json=more)
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "previous_response_id")
    unkept = client.post("/v1/responses", json=ASKED | {"store": False}).json()
    assert client.get(f"/v1/responses/{unkept['id']}").status_code == 404


def test_no_other_key_reads_or_deletes_it(make_client: Callable[..., TestClient]) -> None:
    client = make_client(api_keys=("a", "b"))
    number = client.post("/v1/responses", json=ASKED, headers=A).json()["id"]
    path = f"/v1/responses/{number}"
    assert client.get(path, headers=A).status_code == 200
    assert [client.get(path, headers=B).status_code, client.delete(path, headers=B).status_code] == [404, 404]
    assert client.post(f"{path}/cancel", headers=B).status_code == 404
    assert client.post("/v1/responses", json=ASKED | {"previous_response_id": number}, headers=B).status_code == 404
    assert client.get(path, headers=A).status_code == 200


def test_one_in_the_background_is_polled_and_cancelled(client: TestClient) -> None:
    with client:  # one loop for all requests
        asked = ASKED | {"background": True}
        number = client.post("/v1/responses", json=asked).json()["id"]
        while (body := client.get(f"/v1/responses/{number}").json())["status"] == "in_progress":
            time.sleep(0.01)
        assert shape(body) == shape(client.post("/v1/responses", json=ASKED).json())
        assert client.post(f"/v1/responses/{number}/cancel").status_code == 400
        running = client.post("/v1/responses", json=asked | {"max_output_tokens": 200}).json()
        reply = client.post(f"/v1/responses/{running['id']}/cancel")
        if reply.status_code == 200:  # else it had ended before
            assert reply.json()["status"] == "cancelled"
            assert client.get(f"/v1/responses/{running['id']}").json()["status"] == "cancelled"


@pytest.mark.parametrize(
    "fields",
    [
        {"background": True, "stream": True},
        {"colour": 1},
        {"previous_response_id": "resp_x"},
        {"input": [{"role": "user"}]},
    ],
)
def test_what_is_refused(client: TestClient, fields: dict[str, Any]) -> None:
    reply = client.post("/v1/responses", json=ASKED | fields)
    assert reply.status_code in (400, 404)
    assert reply.json()["error"]["message"]
