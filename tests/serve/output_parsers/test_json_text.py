"""JSON in parts: where an object ends, by what Python's own reader says of it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from turn_texts import json_objects

from specbuild.serve.output_parsers.json_text import CallText, ObjectText


@pytest.mark.slow
@given(json_objects, st.sampled_from([None, 1]), st.sampled_from([":", "\n: "]), st.booleans())
def test_an_object_ends_where_it_ends(value, indent, colon, ascii_only):
    text = json.dumps(value, indent=indent, separators=(",", colon), ensure_ascii=ascii_only)
    reader = ObjectText()
    assert (reader.feed(text + "}x"), reader.state) == (len(text), "whole")


@given(st.text(alphabet='{}[]",:\\ truefalsn0-1.9eE+/bu', max_size=14))
def test_what_is_whole_is_json_and_what_is_json_is_whole(text):
    text, reader = "{" + text, ObjectText()
    end = reader.feed(text)
    if reader.state == "whole":
        json.loads(text[:end])
    else:
        with pytest.raises(ValueError):  # noqa: PT011 - JSONDecodeError, of many texts
            json.loads(text)


def test_a_depth_without_end_is_broken():
    reader = ObjectText()
    reader.feed('{"a":' + "[" * 300)
    assert reader.state == "broken"


@given(json_objects)
def test_a_call_has_its_arguments_letter_by_letter(arguments):
    call, heard = CallText(), ""
    for character in json.dumps({"id": [1], "name": "f", "arguments": arguments, "more": None}):
        assert call.feed(character) == 1
        heard += call.arguments()
    assert (call.state, call.name, heard) == ("whole", "f", json.dumps(arguments))


@pytest.mark.parametrize("text", ['{"name": 3, ', '{"arguments": 3', '{"name": "a\\n", ', "[", "{}", '{"name": "f"}'])
def test_what_is_no_call(text):
    call = CallText()
    call.feed(text)
    assert (call.state, call.begun) == ("broken", False)
