"""Parsers of turns: calls of every form, reasoning, and content, the same however a text is cut."""

import json

import pytest
from data_files import rows
from hypothesis import given
from hypothesis import strategies as st
from turn_texts import CALL, calls, check, cuts, json_objects, parts, texts, whole

from specbuild.runtime.errors import OptionError
from specbuild.serve.output_parsers.calls import ListParser, NamedParser, RequiredParser
from specbuild.serve.output_parsers.hermes import Hermes
from specbuild.serve.output_parsers.parser_base import Turn
from specbuild.serve.output_parsers.pattern import Pattern, expression, literal
from specbuild.serve.output_parsers.reading import Plain, Reading, TurnReader
from specbuild.serve.output_parsers.reasoning import KNOWN, Reasoning, ReasoningParser

ARGUMENTS = '{"a": [1, "}"]}'
F, G = ("f", ARGUMENTS), ("g", "{}")
EXPRESSION = r"<call>(?P<name>\w+)\((?P<arguments>\{.*?\})\)</call>"
THINK = KNOWN["qwen3"]
PARSERS = {
    **{name: Reading(name).free for name in ("hermes", "llama3_json", "mistral", f"regex:{EXPRESSION}")},
    **{"list": ListParser, "named": lambda: NamedParser("f"), "required": RequiredParser, "plain": Plain},
    "thinking": lambda: ReasoningParser(THINK, False, Hermes()),
    "amid thinking": lambda: ReasoningParser(THINK, True, Hermes()),
    "after": lambda: ReasoningParser(Reasoning("", "</think>"), True, Hermes(), "content"),
}


@pytest.mark.parametrize("name", PARSERS)
@given(texts, cuts)
def test_any_cut_gives_the_same(name, text, sizes):
    if name in ("required", "thinking", "amid thinking"):  # which drop what has no meaning there
        assert parts(PARSERS[name](), text, sizes) == whole(PARSERS[name](), text)
    else:
        check(PARSERS[name], text, sizes)


@pytest.mark.parametrize(("name", "text", "content", "called"), rows("turns.jsonl"))
def test_calls_and_content(name, text, content, called):
    turn = whole(PARSERS[name](), text)
    assert (turn.content, [*map(list, calls(turn))]) == (content, called)
    assert parts(PARSERS[name](), text, [1]) == turn


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from("fg"), json_objects), min_size=1, max_size=3), st.floats(0, 1), cuts)
def test_a_list_that_a_limit_cuts_is_calls_alone(given_calls, share, sizes):
    """Whole and in parts: those before the cut are whole, and the last has what came of its arguments."""
    shown = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in given_calls]
    text = ",".join(f'{{"name":"{name}","arguments":{arguments}}}' for name, arguments in shown)
    text = f"[{text}]"
    cut = text[: round(share * len(text))]
    turn = whole(RequiredParser(), cut)
    assert parts(RequiredParser(), cut, sizes) == turn
    found = calls(turn)
    assert (turn.content, turn.reasoning, found[:-1]) == ("", "", shown[: len(found)][:-1])
    for (name, arguments), (whole_name, whole_arguments) in zip(found, shown, strict=False):
        assert name == whole_name
        assert whole_arguments.startswith(arguments)
    if cut == text:
        assert found == shown


def test_arguments_come_as_they_are_written_and_what_may_begin_a_call_is_held():
    parser, said = Hermes(), ["a <too", 'l_call>\n{"name": "f", "arguments": ', '{"a"', ": 1}", "}\n</tool_call>"]
    assert [[piece.text for piece in parser.feed(each)] for each in said] == [["a "], [], ["f", '{"a"'], [": 1}"], []]
    assert parser.end() == []
    parser = Hermes()
    parser.feed("b <too")
    assert [piece.text for piece in parser.feed("t")] == ["<toot"]


@pytest.mark.parametrize(("text", "inside", "reasoning", "content"), rows("reasoning.jsonl"))
def test_reasoning_and_content(text, inside, reasoning, content):
    assert whole(ReasoningParser(THINK, inside, Hermes()), text) == Turn(reasoning, content)
    called = whole(ReasoningParser(THINK, True, Hermes()), f"so</think><tool_call>{CALL}")
    assert (called.reasoning, calls(called)) == ("so", [F])


@pytest.mark.parametrize(
    ("tail", "done"), [("<think>\n", "begun"), ("<think>\n\n</think>\n\n", "ended"), ("assistant\n", None), ("", None)]
)
def test_what_a_prompt_has_done(tail, done):
    assert THINK.in_prompt(tail) == done


def test_names():
    assert Reasoning.of("<a>,</a>") == Reasoning("<a>", "</a>")
    for name in ("other", ",a", "a,a"):
        with pytest.raises(OptionError, match="START,END"):
            Reasoning.of(name)
    assert Reading(reasoning_parser="qwen3").markers(False) == ("<think>", "</think>")
    assert "[TOOL_CALLS]" in Reading("mistral").markers(True)


@pytest.mark.parametrize(("several", "count"), [(True, 2), (False, 1)])
def test_nothing_follows_the_one_call_where_there_may_not_be_several(several, count):
    text, reader = f"First.<tool_call>{CALL}</tool_call>" * 2, TurnReader(Hermes(), several)
    pieces = reader.feed(text[:40], ended=False) + reader.feed(text[40:], ended=True)
    assert len(reader.turn.calls) == reader.turn.content.count("First.") == count
    assert Turn.of(pieces) == reader.turn


@pytest.mark.parametrize(
    "wrong",
    [
        *("(", "<call>(?P<name>a)", r"(?P<name>\w+)(?P<arguments>\{\})", r"a|b(?P<name>\w+)(?P<arguments>\{\})"),
        *(r"a*(?P<name>\w+)(?P<arguments>\{\})", "x" * 2000),
    ],
)
def test_expressions_that_are_refused(wrong):
    with pytest.raises(OptionError) as refused:
        expression(wrong)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("given_expression", "found"),
    [
        *((r"\[call\] (a|b)", "[call] "), ("ab?c", "a"), ("ab+c", "ab"), (r"ab\w", "ab"), (r"a[|]b|c", "")),
        *(("(?i)a", ""), (r"a\|b", "a|b"), (r"a\Z\\", "a")),
    ],
)
def test_the_literal_that_every_match_begins_with(given_expression, found):
    assert literal(given_expression) == found
    assert [piece.text for piece in Pattern(expression(EXPRESSION)).feed("So <ca")] == ["So "]
