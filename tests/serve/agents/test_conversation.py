"""Items become messages of a chat."""

from __future__ import annotations

from typing import Any

import pytest

from specbuild.serve.agents.conversation import chat_of, messages_of
from specbuild.serve.agents.fields import Item, ResponsesRequest
from specbuild.serve.errors import ApiError

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def asked(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"input": "hello"} | fields)


def test_a_request_is_a_chat() -> None:
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
    chat = chat_of(asked(instructions="be brief", max_output_tokens=5, top_k=3, text=form), [])
    assert [(each.role, each.content) for each in chat.messages] == [("system", "be brief"), ("user", "hello")]
    assert (chat.max_tokens, chat.top_k) == (5, 3)
    assert chat.response_format
    assert chat.response_format.json_schema
    assert chat.response_format.json_schema.schema_ == {"type": "object"}
    chat = chat_of(asked(tools=[TOOL], tool_choice={"type": "function", "name": "f"}), [])
    assert chat.tools
    assert chat.tools[0].function.strict
    assert not isinstance(chat.tool_choice, str)


def test_what_the_assistant_does_in_a_row_is_one_message() -> None:
    given: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "yes", "annotations": []}],
        },
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "3"},
        {"role": "developer", "content": "d"},
    ]
    messages = messages_of([Item.model_validate(each) for each in given])
    assert [each["role"] for each in messages] == ["user", "assistant", "tool", "system"]
    assert (messages[0]["content"], messages[1]["content"], messages[1]["reasoning_content"]) == ("ab", "yes", "so")
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["1", "2"]
    assert messages[2] == {"role": "tool", "tool_call_id": "1", "content": "3"}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0 is a function_call without call_id"),
        ({"input": [{"content": "x"}]}, "without role"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ApiError, match=told):
        chat_of(asked(**fields), [])
