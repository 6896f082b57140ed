"""Hermes' calls: several in a text, with content before and between; what is none stays content."""

from __future__ import annotations

import pytest
from hypothesis import given
from turn_texts import CALL, calls, check, cuts, texts, whole

from specbuild.serve.turns.hermes import Hermes

ARGUMENTS = '{"a": [1, "}"]}'


@given(texts, cuts)
def test_any_cut_gives_the_same(text: str, sizes: list[int]) -> None:
    check(Hermes, text, sizes)


@pytest.mark.parametrize(
    ("text", "content", "called"),
    [
        ("plain", "plain", []),
        (f"Yes.\n<tool_call>\n{CALL}\n</tool_call>\n", "Yes.\n", [("f", ARGUMENTS)]),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}", "", [("f", ARGUMENTS)] * 2),
        (f"<tool_call>{CALL}</tool_call> and <tool_call>{CALL}</tool_call>", " and ", [("f", ARGUMENTS)] * 2),
        ('<tool_call>{"arguments": {}, "name": "g"}</tool_call>', "", [("g", "{}")]),
        ('<tool_call>{"name": "g", "id": 7, "arguments": {"a": "\\u00e9"}}', "", [("g", '{"a": "\\u00e9"}')]),
        ('<tool_call>{"name": "g", "arguments": {"a": 1', "", [("g", '{"a": 1')]),
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
        ('<tool_call>{"name": "g"}</tool_call>', '<tool_call>{"name": "g"}</tool_call>', []),
        ('<tool_call>{"name": "", "arguments": {}}', '<tool_call>{"name": "", "arguments": {}}', []),
        ('<tool_call>{"name": "g", "arguments": "a"}', '<tool_call>{"name": "g", "arguments": "a"}', []),
        ("<tool_call> 3", "<tool_call> 3", []),
        ("<tool_cal", "<tool_cal", []),
    ],
)
def test_calls_and_content(text: str, content: str, called: list[tuple[str, str]]) -> None:
    turn = whole(Hermes(), text)
    assert (turn.content, calls(turn)) == (content, called)


def test_arguments_come_as_they_are_written() -> None:
    parser = Hermes()
    parser.feed('<tool_call>\n{"name": "f", "arguments": ')
    assert [piece.text for piece in parser.feed('{"a"')] == ["f", '{"a"']
    assert [piece.text for piece in parser.feed(": 1}")] == [": 1}"]
    assert parser.feed("}\n</tool_call>") == parser.end() == []


def test_what_cannot_begin_a_call_is_not_held() -> None:
    assert [piece.text for piece in Hermes().feed("a <too")] == ["a "]
    parser = Hermes()
    parser.feed("a <too")
    assert [piece.text for piece in parser.feed("t")] == ["<toot"]
