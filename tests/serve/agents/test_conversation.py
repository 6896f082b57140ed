"""Items become messages of a chat, and pieces become items."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from route_client import SCHEMA

from specbuild.serve.agents.conversation import chat_of, messages_of
from specbuild.serve.agents.fields import Item, ResponsesRequest
from specbuild.serve.agents.items import Output
from specbuild.serve.turns.pieces import Piece

TOOL = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}


def test_a_request_is_a_chat() -> None:
    form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    asked = {"input": "hello", "instructions": "be brief", "max_output_tokens": 5, "top_k": 3, "text": form}
    called = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}
    chat = chat_of(ResponsesRequest.model_validate(asked | called), []).model_dump(by_alias=True, exclude_none=True)
    assert [(each["role"], each["content"]) for each in chat["messages"]] == [("system", "be brief"), ("user", "hello")]
    assert (chat["max_tokens"], chat["top_k"]) == (5, 3)
    assert chat["response_format"]["json_schema"]["schema"] == SCHEMA
    assert (chat["tools"][0]["function"]["strict"], chat["tool_choice"]["function"]["name"]) == (True, "f")
    required = ResponsesRequest.model_validate({"input": "x", "tools": [TOOL], "tool_choice": "required"})
    assert chat_of(required, []).tool_choice == "required"


def test_what_the_assistant_does_in_a_row_is_one_message() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    given: list[Any] = [
        {"role": "user", "content": parts},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "yes", "annotations": []}],
        },
        *({"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"} for id in "12"),
        {"type": "function_call_output", "call_id": "1", "output": "3"},
        {"role": "developer", "content": "d"},
    ]
    user, assistant, *rest = messages_of([Item.model_validate(each) for each in given])
    assert (user["content"], assistant["content"], assistant["reasoning_content"]) == ("ab", "yes", "so")
    assert [call["id"] for call in assistant["tool_calls"]] == ["1", "2"]
    assert rest == [{"role": "tool", "tool_call_id": "1", "content": "3"}, {"role": "system", "content": "d"}]


@given(st.lists(st.sampled_from(["reasoning", "content", "call"]), max_size=9))
def test_each_item_is_begun_heard_and_ended_before_the_next(kinds: list[str]) -> None:
    output, number, pieces = Output(), -1, list[Piece]()
    for kind in kinds:
        number += kind == "call"
        pieces.append(Piece(kind, "x", max(number, 0)))  # type: ignore[arg-type]
        if kind == "call":
            pieces.append(Piece("arguments", "{}", number))
    events = [event for piece in pieces for event in output.add(piece)] + list(output.close("incomplete"))
    names = {"reasoning": "reasoning", "content": "message", "call": "function_call"}
    runs = [each for place, each in enumerate(kinds) if each == "call" or kinds[place - 1 : place] != [each]]
    assert [item["type"] for item in output.items] == [names[each] for each in runs]
    ends = [event["type"].rpartition(".")[2] for event in events if ".output_item." in event["type"]]
    assert ends == ["added", "done"] * len(runs)
    assert [item["status"] for item in output.items] == (["completed"] * len(runs))[1:] + ["incomplete"] * bool(runs)
    heard = "".join(event["delta"] for event in events if event["type"].endswith(".delta"))
    assert len(heard) == sum({"call": 2}.get(each, 1) for each in kinds)
    assert list(output.close("completed")) == []
