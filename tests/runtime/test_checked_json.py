"""JSON of a bundle is strict JSON, of the type that was asked for and nothing more."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from specbuild.runtime.checked_json import Probability, checked, decode


@dataclass
class Record:
    share: Probability
    name: str = ""


@pytest.mark.parametrize(
    "text",
    [
        *(
            "NaN",
            "[Infinity]",
            "1e999",
            '{"a": 1, "a": 2}',
            '"\\ud800"',
            '{"\\ud800": 1}',
            "9" * 5000,
            "[" * 100_000,
            "",
        ),
        '{"a":' * 50_000,
    ],
)
def test_what_is_no_strict_json_is_refused(text):
    with pytest.raises(ValueError, match=r"\w"):
        decode(text.encode())
    with pytest.raises(ValueError, match=r"\w"):
        decode(b"\xff" + text.encode())


def test_what_is_json_is_read():
    assert decode('{"a": [1, 2.5, null, true, "é"]}'.encode()) == {"a": [1, 2.5, None, True, "é"]}


@pytest.mark.parametrize("value", [{}, [], None, {"share": "1"}, {"share": True}, {"share": 1.1}, {"share": 1, "x": 0}])
def test_another_type_is_refused(value):
    with pytest.raises(ValueError, match=r"\w"):
        checked(value, Record)
    assert checked({"share": 1}, Record) == Record(1.0)
