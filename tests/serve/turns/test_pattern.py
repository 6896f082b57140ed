"""Calls by a regular expression: which it may be, and what its matches are."""

from __future__ import annotations

import pytest
from hypothesis import given
from turn_texts import calls, check, cuts, texts, whole

from specbuild.runtime.errors import OptionError
from specbuild.serve.turns.pattern import Pattern, expression, literal

GIVEN = r"<call>(?P<name>\w+)\((?P<arguments>\{.*?\})\)</call>"


def parser() -> Pattern:
    return Pattern(expression(GIVEN))


@given(texts, cuts)
def test_any_cut_gives_the_same(text: str, sizes: list[int]) -> None:
    check(parser, text, sizes)


def test_calls_and_content() -> None:
    turn = whole(parser(), 'So <call>f({"a": 1})</call>\n<call>g({})</call>\n<call>h({3})</call> x')
    assert (turn.content, calls(turn)) == ("So \n<call>h({3})</call> x", [("f", '{"a": 1}'), ("g", "{}")])
    assert [piece.text for piece in parser().feed("So <ca")] == ["So "]


@pytest.mark.parametrize(
    ("given_expression", "told"),
    [
        ("(", "no regular expression"),
        ("<call>(?P<name>a)", "two groups"),
        (r"(?P<name>\w+)(?P<arguments>\{\})", "begin with a literal"),
        (r"a|b(?P<name>\w+)(?P<arguments>\{\})", "begin with a literal"),
        (r"a*(?P<name>\w+)(?P<arguments>\{\})", "begin with a literal"),
        ("x" * 2000, "more than 1,024"),
    ],
)
def test_what_is_refused(given_expression: str, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        expression(given_expression)


@pytest.mark.parametrize(
    ("given_expression", "found"),
    [
        (r"\[call\] (a|b)", "[call] "),
        ("ab?c", "a"),
        ("ab+c", "ab"),
        (r"ab\w", "ab"),
        (r"a[|]b|c", ""),
        ("(?i)a", ""),
        (r"a\|b", "a|b"),
        (r"a\Z\\", "a"),
    ],
)
def test_the_literal_that_every_match_begins_with(given_expression: str, found: str) -> None:
    assert literal(given_expression) == found
