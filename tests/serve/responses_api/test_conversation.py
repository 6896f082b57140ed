"""Requests of other routes become chats or completions, and pieces become items."""

import msgspec
import pytest
from data_files import rows
from hypothesis import given
from hypothesis import strategies as st
from route_client import MESSAGES, RESPONSES

from specbuild.serve.anthropic import messages
from specbuild.serve.anthropic.fields import MessagesRequest
from specbuild.serve.clouds.fields import GenerateRequest
from specbuild.serve.clouds.tgi import completion_of
from specbuild.serve.output_parsers.parser_base import Piece
from specbuild.serve.request.body import converted
from specbuild.serve.responses_api import conversation
from specbuild.serve.responses_api.fields import ResponsesRequest
from specbuild.serve.responses_api.items import Output

READERS = {
    "/generate": lambda body: completion_of(converted(GenerateRequest, body), stream=False),
    RESPONSES: lambda body: conversation.chat_of(converted(ResponsesRequest, body), []),
    MESSAGES: lambda body: messages.chat_of(converted(MessagesRequest, body)),
}


@pytest.mark.parametrize("told", rows("translated_bodies.jsonl"))
def test_a_request_is_a_chat_or_a_completion(told):
    found = READERS[told["path"]](told["body"])
    assert msgspec.to_builtins(found) == told["translated"]


@given(st.lists(st.sampled_from(["reasoning", "content", "call"]), max_size=9))
def test_each_item_is_begun_heard_and_ended_before_the_next(kinds):
    output, number, pieces = Output(), -1, list[Piece]()
    for kind in kinds:
        number += kind == "call"
        pieces.append(Piece(kind, "x", max(number, 0)))
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
