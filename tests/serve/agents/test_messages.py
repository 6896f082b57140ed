"""/v1/messages as translated: chats of requests, and blocks of pieces with their events."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from route_client import SAID, SCHEMA

from specbuild.serve.agents.message_fields import MessagesRequest
from specbuild.serve.agents.messages import Content, chat_of
from specbuild.serve.turns.pieces import Piece

TOOL = {"name": "weather", "description": "Says it.", "input_schema": SCHEMA}
USED = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def chat(**fields: Any) -> dict[str, Any]:
    asked = {"messages": SAID, "max_tokens": 12} | fields
    return chat_of(MessagesRequest.model_validate(asked)).model_dump(exclude_none=True)


def test_blocks_become_messages() -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no such city", "is_error": True}
    other = {"type": "tool_result", "tool_use_id": "toolu_2", "content": [text("sun")]}
    said = [
        {"role": "user", "content": [text("Is it "), text("warm?")]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, USED]},
        {"role": "user", "content": [result, other, text("So?")]},
    ]
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    call = {"id": "toolu_1", "type": "function", "function": function}
    assert chat(messages=said, system=[text("Be brief.")])["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Is it warm?"},
        {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Error: no such city"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "sun"},
        {"role": "user", "content": "So?"},
    ]


def test_fields_have_a_chats_names() -> None:
    asked = {"stop_sequences": ["\n\n"], "metadata": {"user_id": "u"}, "top_k": 3, "tools": [TOOL]}
    told = chat(**asked, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    wanted = {"stop": ["\n\n"], "user": "u", "top_k": 3, "max_tokens": 12, "tool_choice": "required"}
    assert (wanted | {"parallel_tool_calls": False}).items() <= told.items()
    assert told["tools"][0]["function"]["parameters"] == SCHEMA
    named = chat(tools=[TOOL], tool_choice={"type": "tool", "name": "weather"})
    assert named["tool_choice"] == {"type": "function", "function": {"name": "weather"}}


PIECES = st.lists(
    st.builds(Piece, st.sampled_from(["content", "reasoning"]), st.text(max_size=5))
    | st.just(Piece("call", "weather"))
    | st.builds(Piece, st.just("arguments"), st.sampled_from(["{", '"a"', ": 1", "}"])),
    max_size=12,
)


@given(PIECES)
def test_events_add_up_to_the_blocks(pieces: list[Piece]) -> None:
    called, content, told = False, Content(), list[dict[str, Any]]()
    for piece in pieces:
        if piece.kind != "arguments" or called:
            called = piece.kind in ("call", "arguments")
            told += content.add(piece)
    blocks = list[dict[str, Any]]()
    for event in told + list(content.close()):
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({"text": "", "thinking": "", "partial_json": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            for name in blocks[-1]:
                blocks[-1][name] += event["delta"].get(name, "")
    for block, found in zip(content.blocks, blocks, strict=True):
        if block["type"] != "tool_use":
            assert found[block["type"]] == block[block["type"]]
        elif block["input"]:
            assert json.loads(found["partial_json"]) == block["input"]
