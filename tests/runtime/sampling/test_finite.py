"""Structures without a finite text are refused, and no other: against the least fixed point of their rules."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_grammars import vocabulary

from specbuild.runtime.sampling import lark, schemas
from specbuild.runtime.sampling.grammar_process import Tokenizers, compiled

COUNT = 4  # definitions

bodies = st.lists(
    st.lists(st.lists(st.integers(0, COUNT - 1), max_size=2), min_size=1, max_size=3), min_size=COUNT, max_size=COUNT
)


def productive(rules):
    """Whether the first definition has a finite text."""
    found = set[int]()
    for _ in rules:
        found |= {name for name, ways in enumerate(rules) if any(found.issuperset(way) for way in ways)}
    return 0 in found


def reference(number):
    return {"$ref": f"#/$defs/n{number}"}


def instance(way, kind):
    """A schema whose instances contain one of each definition."""
    parts = [reference(each) for each in way]
    if kind == "object":
        properties = {f"p{place}": part for place, part in enumerate(parts)}
        return {"type": "object", "properties": properties | {"free": {"$ref": "#"}}, "required": [*properties]}
    if kind == "array":
        return {"type": "array", "prefixItems": parts, "items": {"$ref": "#"}, "minItems": len(parts)}
    return {"type": ["object"], "additionalProperties": {"allOf": parts}, "required": ["any"]} if parts else {}


@pytest.mark.slow
@given(bodies, st.data())
def test_of_schemas(rules, data):
    kinds = st.sampled_from(["object", "array", "other"])
    union = st.sampled_from(["anyOf", "oneOf"])
    definitions = {
        f"n{name}": {data.draw(union): [instance(way, data.draw(kinds)) for way in ways]}
        for name, ways in enumerate(rules)
    }
    assert schemas.is_finite({"$defs": definitions, **reference(0)}) == productive(rules)


TOKENIZER = Tokenizers(vocabulary()).tokenizer({})


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("end", [{"type": "null"}, {"$ref": "#/$defs/n0"}])
def test_of_long_chains(order, end):
    names = range(2000)[::order]
    definitions = {f"n{name}": {"properties": {"a": reference(name + 1)}, "required": ["a"]} for name in names}
    held = {name: {"type": "object", **body} for name, body in definitions.items()} | {"n2000": end}
    assert schemas.is_finite({"$defs": held, **reference(0)}) == ("type" in end)


def accepts_nothing(text):
    try:
        return bool(compiled(TOKENIZER, text).is_accepting())
    except ValueError:
        return None


PARTS = st.sampled_from(
    ['"a"', "/b+/", "T", '"c"~1..3', '("d" | T)+', '"//"', "<s>", "%json {}", '"a".."d"', r"/[\/<]/", r'"\""', "t"]
)


@settings(max_examples=30)
@given(bodies, st.data())
def test_of_grammars(rules, data):
    lines = ['%llguidance {"no_forcing": true}', r"T: /x|\/\//", '   | "y" // {"a": <t> start}', "t[lazy]: T"]
    for name, ways in enumerate(rules):
        texts = [" ".join([data.draw(PARTS), *(f"n{each}" for each in way)]) for way in ways]
        lines.append(f"n{name}: {' | '.join(texts)}")
    text = "\n".join([*lines, "start: n0"])
    assert accepts_nothing(text) is not None, text
    assert lark.is_finite(text, accepts_nothing) == productive(rules), text


@pytest.mark.parametrize("text", ["start: A+\nA: /a/ & ~/b/", 'start: %regex {"substring_words": "a b"}', "start: a"])
def test_what_is_not_known_is_not_refused(text):
    assert lark.is_finite(text, accepts_nothing)
