"""Calls that were asked for: a list of them, and the arguments of one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from turn_texts import CALL, calls, check, cuts, parts, texts, whole

from specbuild.serve.turns.calls import ListParser, NamedParser, RequiredParser

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


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
made = st.tuples(st.sampled_from(("f", "weather")), st.dictionaries(st.text(max_size=3), json_values, max_size=3))


@given(st.lists(made, min_size=1, max_size=3), st.floats(0, 1), cuts)
def test_a_list_that_a_limit_cuts_is_calls_alone(
    given_calls: list[tuple[str, object]], share: float, sizes: list[int]
) -> None:
    """Whole and in parts: those before the cut are whole, and the last has what came of its arguments."""
    shown = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in given_calls]
    text = ",".join(f'{{"name":"{name}","arguments":{arguments}}}' for name, arguments in shown)
    text = f"[{text}]"
    cut = text[: round(share * len(text))]
    turn = whole(RequiredParser(), cut)
    assert parts(RequiredParser(), cut, sizes) == turn
    assert (turn.content, turn.reasoning) == ("", "")
    found = calls(turn)
    assert found[:-1] == shown[: len(found)][:-1]
    for (name, arguments), (whole_name, whole_arguments) in zip(found, shown, strict=False):
        assert name == whole_name
        assert whole_arguments.startswith(arguments)
    if cut == text:
        assert found == shown


@pytest.mark.parametrize(
    ("text", "called"),
    [
        (f"[{CALL},", [("f", ARGUMENTS)]),
        (f'[{CALL},{{"na', [("f", ARGUMENTS)]),
        (f'[{CALL},{{"name":"g"', [("f", ARGUMENTS)]),
        (f'[{CALL},{{"name":"g","argu', [("f", ARGUMENTS), ("g", "")]),
        (f'[{CALL},{{"name":"g","arguments":', [("f", ARGUMENTS), ("g", "")]),
        (f'[{CALL},{{"name":"g","arguments":{{"a', [("f", ARGUMENTS), ("g", '{"a')]),
        ('[{"name":"stop","argum', [("stop", "")]),
        ("[", []),
    ],
)
def test_what_is_left_of_a_call(text: str, called: list[tuple[str, str]]) -> None:
    turn = whole(RequiredParser(), text)
    assert (turn.content, calls(turn)) == ("", called)
