"""Llama 3's calls: a text is calls or content by how it begins."""

from __future__ import annotations

import pytest
from hypothesis import given
from turn_texts import calls, check, cuts, texts, whole

from specbuild.serve.turns.llama3 import Llama3


@given(texts, cuts)
def test_any_cut_gives_the_same(text: str, sizes: list[int]) -> None:
    check(Llama3, text, sizes)


@pytest.mark.parametrize(
    ("text", "content", "called"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ('<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        (
            '\n{"name": "f", "parameters": {}}; {"name": "g", "arguments": {"b": 2}}\n',
            "",
            [("f", "{}"), ("g", '{"b": 2}')],
        ),
        ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ('See {"name": "f", "parameters": {}}', 'See {"name": "f", "parameters": {}}', []),
        ('{"name": "f", "parameters": {}} done', " done", [("f", "{}")]),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("<|python", "<|python", []),
    ],
)
def test_calls_and_content(text: str, content: str, called: list[tuple[str, str]]) -> None:
    turn = whole(Llama3(), text)
    assert (turn.content, calls(turn)) == (content, called)
