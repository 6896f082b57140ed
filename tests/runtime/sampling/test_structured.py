"""What a text has to be: exactly one thing, within bounds, and written down as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specbuild.runtime.errors import OptionError
from specbuild.runtime.sampling.parameters import SamplingParams
from specbuild.runtime.sampling.structured import MAX_BYTES, MAX_CHOICES, MAX_DEPTH, StructuredOutputs

TAG = {"structures": [{"begin": "<f=x>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f"]}
SOUND: list[dict[str, Any]] = [
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
def test_what_is_sound_survives_json(fields: dict[str, Any]) -> None:
    made = StructuredOutputs.of(fields)
    again = StructuredOutputs.of(json.loads(json.dumps(made.to_dict())))
    assert again == made
    assert again.key == made.key
    assert hash(again) == hash(made)
    assert SamplingParams(structured_outputs=fields).structured_outputs == made
    assert StructuredOutputs.of(made) is made


def test_a_schema_s_properties_keep_their_order() -> None:
    assert str(StructuredOutputs(**SOUND[0]).json).index('"z"') < str(StructuredOutputs(**SOUND[0]).json).index('"a"')


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


REFUSED: list[tuple[Any, str]] = [
    ({}, "has nothing: give exactly one of json, regex"),
    ({"json": {}, "regex": "a"}, "has json and regex: give exactly one"),
    ({"json": False}, "allows nothing"),
    ({"json": 3}, "must be a JSON schema"),
    ({"json": "{"}, "is not JSON"),
    ({"json": "[1]"}, "must be a JSON schema"),
    ({"json": {"a": float("nan")}}, "is not JSON"),
    ({"json": {"a": object()}}, "is not JSON"),
    ({"json": {"a": {"$ref": "https://example.com/schema"}}}, "is not fetched"),
    ({"json": {"a": {"$ref": "file:///etc/passwd"}}}, "is not fetched"),
    ({"json": {"x-guidance": {"lenient": True}}}, "x-guidance"),
    ({"json": {"d": "x" * MAX_BYTES}}, "more than 262,144"),
    ({"json": nested(MAX_DEPTH + 1)}, "nested deeper than 64"),
    ({"json": nested(100_000)}, "json"),
    ({"regex": ""}, "must be a text that is not empty"),
    ({"regex": "a" * (MAX_BYTES + 1)}, "more than 262,144"),
    ({"regex": "\ud800"}, "not valid Unicode"),
    ({"grammar": 3}, "must be a text"),
    ({"choice": []}, "must be a list of 1"),
    ({"choice": "yes"}, "must be a list of 1"),
    ({"choice": ["a", 3]}, "must be a text"),
    ({"choice": ["a"] * (MAX_CHOICES + 1)}, "must be a list of 1"),
    ({"json_object": 1}, "must be true or false"),
    ({"json_object": True, "any_whitespace": "no"}, "must be true or false"),
    ({"json_object": True, "after": ""}, "after must be a text"),
    ({"structural_tag": {}}, "structural_tag must be"),
    ({"structural_tag": TAG | {"triggers": [""]}}, "structural_tag must be"),
    ({"structural_tag": TAG | {"triggers": ["<g"]}}, "starts with no trigger"),
    ({"structural_tag": TAG | {"structures": [{"begin": "<f"}]}}, "needs begin, schema and end"),
    ({"structural_tag": TAG | {"structures": [TAG["structures"][0] | {"schema": 3}]}}, "must be a JSON schema"),  # type: ignore[operator]
    ({"colour": "red"}, "unknown field 'colour'"),
    ("json", "give an object"),
]


@pytest.mark.parametrize(("fields", "told"), REFUSED)
def test_what_is_wrong_is_said_in_a_line(fields: Any, told: str) -> None:
    with pytest.raises(OptionError) as caught:
        SamplingParams(structured_outputs=fields)
    assert told in str(caught.value)
    assert "structured_outputs" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_the_deepest_schema_is_taken() -> None:
    assert StructuredOutputs(json=nested(MAX_DEPTH - 1)).json


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"constraint": pytest}])
def test_what_contradicts_it(more: dict[str, Any]) -> None:
    class Free:
        def matcher(self, vocab_size: int) -> None:
            pass

    given = {"constraint": Free()} if "constraint" in more else more
    with pytest.raises(OptionError, match="structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"}, **given)
