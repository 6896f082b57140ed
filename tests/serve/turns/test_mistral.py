"""Mistral's calls, in both of its forms."""

from __future__ import annotations

import pytest
from hypothesis import given
from turn_texts import CALL, calls, check, cuts, texts, whole

from specbuild.serve.turns.mistral import Mistral

ARGUMENTS = '{"a": [1, "}"]}'


@given(texts, cuts)
def test_any_cut_gives_the_same(text: str, sizes: list[int]) -> None:
    check(Mistral, text, sizes)


@pytest.mark.parametrize(
    ("text", "content", "called"),
    [
        (f"[TOOL_CALLS] [{CALL}, {CALL}]", "", [("f", ARGUMENTS)] * 2),
        (f"So.[TOOL_CALLS][{CALL}", "So.", [("f", ARGUMENTS)]),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}', "", [("f", '{"a": 1}'), ("g", "{}")]),
        ('[TOOL_CALLS]f[CALL_ID]abc123DEF[ARGS]{"a": 1', "", [("f", '{"a": 1')]),
        ("[TOOL_CALLS] not a name {", "[TOOL_CALLS] not a name {", []),
        ("[TOOL_CALLS] of these", "[TOOL_CALLS] of these", []),
        ("[TOOL_CALLS][3]", "[TOOL_CALLS][3]", []),
        ("[TOOL_CALLS]" + "x" * 300, "[TOOL_CALLS]" + "x" * 300, []),
    ],
)
def test_calls_and_content(text: str, content: str, called: list[tuple[str, str]]) -> None:
    turn = whole(Mistral(), text)
    assert (turn.content, calls(turn)) == (content, called)
