"""Calls that were asked for: a list of them, and the arguments of one."""

from __future__ import annotations

import pytest
from hypothesis import given
from turn_texts import CALL, calls, check, cuts, texts, whole

from specbuild.serve.turns.calls import ListParser, NamedParser

ARGUMENTS = '{"a": [1, "}"]}'


@given(texts, cuts)
def test_any_cut_gives_the_same(text: str, sizes: list[int]) -> None:
    check(ListParser, text, sizes)
    assert calls(check(lambda: NamedParser("f"), text, sizes)) == [("f", text)]


@pytest.mark.parametrize(
    ("text", "content", "called"),
    [
        (f"[{CALL},{CALL}]", "", [("f", ARGUMENTS)] * 2),
        (f"[{CALL},", "", [("f", ARGUMENTS)]),
        ('[{"name":"stop","argum', '[{"name":"stop","argum', []),
        ('[{"name":"stop","arguments":{"a"', "", [("stop", '{"a"')]),
        ("[ ", "[ ", []),
        ("said", "said", []),
    ],
)
def test_a_list(text: str, content: str, called: list[tuple[str, str]]) -> None:
    turn = whole(ListParser(), text)
    assert (turn.content, calls(turn)) == (content, called)
