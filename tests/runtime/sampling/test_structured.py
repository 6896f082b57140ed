"""What a text has to be: exactly one thing, within bounds, and written down as JSON."""

import json

import pytest
from constraints import OneOf

from specbuild.runtime.errors import OptionError
from specbuild.runtime.sampling.parameters import SamplingParams
from specbuild.runtime.sampling.structured import StructuredOutputs

TAG = {"structures": [{"begin": "<f=x>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f"]}
SOUND = [
    {"json": {"type": "object", "properties": {"z": {}, "a": {"$ref": "#/$defs/n"}}, "$defs": {"n": True}}},
    {"json": '{"type": "string"}', "any_whitespace": True},
    {"json": True},
    {"regex": "[a-z]+é"},
    {"choice": ["yes", "no"]},
    {"grammar": 'start: "a"'},
    {"json_object": True, "after": "</think>"},
    {"structural_tag": TAG},
]


@pytest.mark.parametrize("fields", SOUND)
def test_what_is_sound_survives_json(fields):
    made = StructuredOutputs.of(fields)
    again = StructuredOutputs.of(json.loads(json.dumps(made.to_dict())))
    assert again == made == SamplingParams(structured_outputs=fields).structured_outputs
    assert (again.key, hash(again)) == (made.key, hash(made))
    if fields is SOUND[0]:
        assert str(made.json).index('"z"') < str(made.json).index('"a"'), "properties keep their order"


DEEPEST = 64  # as the error says


def nested(depth):
    return '{"items":' * depth + "{}" + "}" * depth


REFUSED = [
    *({"json": wrong} for wrong in (False, 3, "{", "[1]", {"a": float("nan")}, {"a": object()})),
    *({"json": {"a": {"$ref": where}}} for where in ("https://example.com/schema", "file:///etc/passwd")),
    *({"json": wrong} for wrong in ({"x-guidance": {"lenient": True}}, {"d": "x" * 2**18})),
    *({"json": nested(depth)} for depth in (DEEPEST + 1, 100_000)),
    *({"regex": wrong} for wrong in ("", "a" * (2**18 + 1), "\ud800")),
    *({"choice": wrong} for wrong in ([], "yes", ["a", 3], ["a"] * 100_000)),
    *({"structural_tag": wrong} for wrong in ({}, TAG | {"triggers": [""]}, TAG | {"triggers": ["<g"]})),
    {"structural_tag": TAG | {"structures": [{"begin": "<f"}]}},
    {"structural_tag": TAG | {"structures": [TAG["structures"][0] | {"schema": 3}]}},
    *({"json_object": True} | wrong for wrong in ({"any_whitespace": "no"}, {"after": ""}, {"regex": "a"})),
    *({}, {"grammar": 3}, {"json_object": 1}, {"colour": "red"}, "json"),
]


@pytest.mark.parametrize("fields", REFUSED)
def test_what_is_wrong_is_said_in_a_line(fields):
    with pytest.raises(OptionError, match="structured_outputs") as caught:
        SamplingParams(structured_outputs=fields)
    assert len(str(caught.value)) < 600


def test_the_deepest_schema_is_taken():
    assert StructuredOutputs(json=nested(DEEPEST - 1)).json


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"constraint": OneOf(((1,),), 2)}])
def test_what_contradicts_it(more):
    with pytest.raises(OptionError, match="structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"}, **more)
