"""Texts in which calls, reasoning and what looks like them are mixed, and their turns, whole and in parts."""

from hypothesis import strategies as st

from specbuild.serve.output_parsers.parser_base import Turn

CALL = '{"name": "f", "arguments": {"a": [1, "}"]}}'
ATOMS = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<call>", "<think>", "</think>"),
    *(CALL, '{"arguments":{"b":-2.5e3},"name":"h"}', '{"name":"g","parameters":{}}', '{"name": "f"}', '{"na'),
    *('{"name":"é","arguments":{', '"a":tru', "name[ARGS]{", '<call>f({"a":1})</call>', "[", "]", ",", ";", "{", "}"),
    *('"', "\n", " ", "x"),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
json_objects = st.dictionaries(st.text(max_size=3), json_values, max_size=4)
texts = st.lists(st.sampled_from(ATOMS), max_size=8).map("".join)
cuts = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def whole(parser, text):
    """The turn of a text that comes at once."""
    return Turn.of(parser.feed(text) + parser.end())


def parts(parser, text, sizes):
    """The turn of a text that comes in parts, their sizes by turns."""
    pieces, place, number = [], 0, 0
    while place < len(text):
        size = sizes[number % len(sizes)]
        pieces += parser.feed(text[place : place + size])
        place, number = place + size, number + 1
    return Turn.of(pieces + parser.end())


def check(make, text, sizes):
    """Any cut gives the whole's turn, and a text without calls is content to its last character."""
    turn = whole(make(), text)
    assert parts(make(), text, sizes) == turn
    if not turn.calls and not turn.reasoning:
        assert turn.content == text
    return turn


def calls(turn):
    """Names and arguments."""
    return [(call.name, call.arguments) for call in turn.calls]
