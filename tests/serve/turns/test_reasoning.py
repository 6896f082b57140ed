"""Reasoning and what comes behind it, by the tokens that begin and end it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from turn_texts import CALL, calls, check, cuts, parts, texts, whole

from specbuild.runtime.errors import OptionError
from specbuild.serve.turns.hermes import Hermes
from specbuild.serve.turns.pieces import Turn
from specbuild.serve.turns.reasoning import KNOWN, Reasoning, ReasoningParser

THINK = KNOWN["qwen3"]


def parser(inside: bool = False) -> ReasoningParser:
    return ReasoningParser(THINK, inside, Hermes())


@given(texts, cuts, st.booleans())
def test_any_cut_gives_the_same(text: str, sizes: list[int], inside: bool) -> None:
    assert parts(parser(inside), text, sizes) == whole(parser(inside), text)
    check(lambda: ReasoningParser(Reasoning("", "</think>"), True, Hermes(), "content"), text, sizes)


@pytest.mark.parametrize(
    ("text", "inside", "turn"),
    [
        ("<think>so</think>yes", False, Turn("so", "yes")),
        ("\n<think>so</think>yes", True, Turn("so", "yes")),
        ("so</think>yes", True, Turn("so", "yes")),
        ("so</think>yes", False, Turn("", "so</think>yes")),
        ("so it is </thi", True, Turn("so it is </thi")),
        ("yes <think>so</think>", False, Turn("", "yes <think>so</think>")),
        ("<think>a</think>b</think>", False, Turn("a", "b</think>")),
        ("<thi", False, Turn("", "<thi")),
    ],
)
def test_reasoning_and_content(text: str, inside: bool, turn: Turn) -> None:
    assert whole(parser(inside), text) == turn


def test_a_reasoning_has_no_calls() -> None:
    turn = whole(parser(), f"<think><tool_call>{CALL}</tool_call></think><tool_call>{CALL}")
    assert turn.reasoning == f"<tool_call>{CALL}</tool_call>"
    assert len(calls(turn)) == 1


@pytest.mark.parametrize(
    ("tail", "done"), [("<think>\n", "begun"), ("<think>\n\n</think>\n\n", "ended"), ("assistant\n", None), ("", None)]
)
def test_what_a_prompt_has_done(tail: str, done: str | None) -> None:
    assert THINK.in_prompt(tail) == done


def test_names() -> None:
    assert Reasoning.of("<a>,</a>") == Reasoning("<a>", "</a>")
    assert Reasoning.of("deepseek_r1").always
    for name in ("other", ",a", "a,a"):
        with pytest.raises(OptionError, match="START,END"):
            Reasoning.of(name)
