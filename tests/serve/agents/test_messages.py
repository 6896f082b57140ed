"""/v1/messages as translated: chats of requests, blocks of pieces, messages and their events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from specbuild.serve.agents.message_fields import MessagesRequest
from specbuild.serve.agents.messages import Content, chat_of
from specbuild.serve.errors import ApiError
from specbuild.serve.turns.pieces import Piece

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "description": "Says it.", "input_schema": SCHEMA}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "a loop"}], "max_tokens": 12, "temperature": 0}
USED = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}


def chat(**fields: Any) -> dict[str, Any]:
    return chat_of(MessagesRequest.model_validate(ASKED | fields)).model_dump(exclude_none=True)


def test_blocks_become_messages() -> None:
    said = [
        {"role": "user", "content": [{"type": "text", "text": "Is it "}, {"type": "text", "text": "warm?"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, USED]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no such city", "is_error": True},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": [{"type": "text", "text": "sun"}]},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert chat(messages=said, system=[{"type": "text", "text": "Be brief."}])["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Is it warm?"},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Error: no such city"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "sun"},
        {"role": "user", "content": "So?"},
    ]


def test_fields_have_a_chats_names() -> None:
    asked = {"stop_sequences": ["\n\n"], "metadata": {"user_id": "u"}, "top_k": 3, "tools": [TOOL]}
    told = chat(**asked, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert (told["stop"], told["user"], told["top_k"], told["max_tokens"]) == (["\n\n"], "u", 3, 12)
    assert (told["tool_choice"], told["parallel_tool_calls"]) == ("required", False)
    assert told["tools"][0]["function"]["parameters"] == SCHEMA
    named = chat(tools=[TOOL], tool_choice={"type": "tool", "name": "weather"})
    assert named["tool_choice"] == {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [USED]}]}, "messages.0.content.0"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_what_is_no_message_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)


PIECES = st.lists(
    st.builds(Piece, st.sampled_from(["content", "reasoning"]), st.text(max_size=5))
    | st.just(Piece("call", "weather"))
    | st.builds(Piece, st.just("arguments"), st.sampled_from(["{", '"a"', ": 1", "}"])),
    max_size=12,
)


@given(PIECES)
def test_events_add_up_to_the_blocks(pieces: list[Piece]) -> None:
    called, content, blocks = False, Content(), list[dict[str, Any]]()
    told = list[dict[str, Any]]()
    for piece in pieces:
        if piece.kind == "arguments" and not called:
            continue
        called = piece.kind in ("call", "arguments")
        told += content.add(piece)
    told += content.close()
    for event in told:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]) | {"arguments": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            for name in ("text", "thinking"):
                blocks[-1][name] = blocks[-1].get(name, "") + event["delta"].get(name, "")
            blocks[-1]["arguments"] += event["delta"].get("partial_json", "")
    assert len(blocks) == len(content.blocks)
    for block, found in zip(content.blocks, blocks, strict=True):
        if block["type"] != "tool_use":
            assert found[block["type"]] == block[block["type"]]
        elif block["input"]:
            assert json.loads(found["arguments"]) == block["input"]


def streamed(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    lines = client.post("/v1/messages", json=ASKED | fields | {"stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [line[7:] for line in lines if line.startswith("event: ")] == [event["type"] for event in events]
    return events


def test_a_text_is_the_chats(client: TestClient) -> None:
    said = client.post("/v1/chat/completions", json=ASKED).json()["choices"][0]["message"]["content"]
    body = client.post("/v1/messages", json=ASKED).json()
    assert body["content"] == [{"type": "text", "text": said}]
    assert (body["type"], body["role"], body["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert body["usage"]["output_tokens"] == 12
    events = streamed(client)
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == said
    assert [event["type"] for event in (events[0], *events[-3:])] == [
        *("message_start", "content_block_stop", "message_delta", "message_stop")
    ]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    counted = client.post("/v1/messages/count_tokens", json={"messages": ASKED["messages"]}).json()["input_tokens"]
    assert counted == body["usage"]["input_tokens"] + body["usage"]["cache_read_input_tokens"] > 0
    stopped = client.post("/v1/messages", json=ASKED | {"stop_sequences": [said[3:6]]}).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", said[3:6])


def test_a_call_is_a_block(client: TestClient) -> None:
    fields = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 60}
    body = client.post("/v1/messages", json=ASKED | fields).json()
    (call,) = body["content"]
    assert (call["type"], call["name"], body["stop_reason"]) == ("tool_use", "weather", "tool_use")
    assert call["input"]["city"] in ("Rome", "Oslo")
    deltas = [event["delta"] for event in streamed(client, **fields) if event["type"] == "content_block_delta"]
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == call["input"]
    cut = client.post("/v1/messages", json=ASKED | fields | {"max_tokens": 1}).json()
    assert (cut["content"][0]["input"], cut["stop_reason"]) == ({}, "max_tokens")
