"""Pieces become items and events, each item begun, heard and ended."""

from __future__ import annotations

from specbuild.serve.agents.items import Output
from specbuild.serve.turns.pieces import Piece


def test_items_come_and_end_in_order() -> None:
    output = Output()
    pieces = [Piece("reasoning", "so"), Piece("content", "a"), Piece("content", "b"), Piece("call", "f")]
    pieces += [Piece("arguments", "{}"), Piece("call", "g", 1)]
    events = [event for piece in pieces for event in output.add(piece)] + list(output.close("incomplete"))
    kinds = [event["type"].removeprefix("response.") for event in events]
    message = ["output_item.added", "content_part.added", "output_text.delta", "output_text.delta", "output_text.done"]
    assert kinds[6:13] == [*message, "content_part.done", "output_item.done"]
    assert kinds[-3:] == ["output_item.added", "function_call_arguments.done", "output_item.done"]
    assert [item["type"] for item in output.items] == ["reasoning", "message", "function_call", "function_call"]
    assert [item["status"] for item in output.items] == ["completed"] * 3 + ["incomplete"]
    assert output.items[1]["content"] == [{"type": "output_text", "text": "ab", "annotations": [], "logprobs": []}]
    assert output.items[2]["arguments"] == "{}"
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["status"] for item in added] == ["in_progress"] * 4
    assert list(output.close("completed")) == []
