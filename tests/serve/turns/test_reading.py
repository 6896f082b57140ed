"""Parsers by their names, and a turn's reader."""

from __future__ import annotations

import pytest
from turn_texts import CALL, whole

from specbuild.runtime.errors import OptionError
from specbuild.serve.turns.hermes import Hermes
from specbuild.serve.turns.pieces import Turn
from specbuild.serve.turns.reading import Plain, Reading, TurnReader

EXPRESSION = r"<call>(?P<name>\w+)(?P<arguments>\{\})"


def test_parsers_by_name() -> None:
    named = {name: type(Reading(name).free()).__name__ for name in ("hermes", "llama3_json", "mistral")}
    assert named == {"hermes": "Hermes", "llama3_json": "Llama3", "mistral": "Mistral"}
    (call,) = whole(Reading(f"regex:{EXPRESSION}").free(), "<call>f{}").calls
    assert call.name == "f"
    assert Reading(reasoning_parser="qwen3").markers(False) == ("<think>", "</think>")
    assert "[TOOL_CALLS]" in Reading("mistral").markers(True)
    assert [Reading(name).constrains for name in ("hermes", "mistral")] == [True, False]


@pytest.mark.parametrize(
    "fields", [{"tool_call_parser": "x"}, {"tool_call_parser": "regex:("}, {"reasoning_parser": "x"}]
)
def test_what_is_refused(fields: dict[str, str]) -> None:
    with pytest.raises(OptionError):
        Reading(**fields)  # type: ignore[arg-type]


def test_one_call_where_there_may_not_be_several() -> None:
    text = f"<tool_call>{CALL}</tool_call>" * 2
    for several, count in ((True, 2), (False, 1)):
        reader = TurnReader(Hermes(), several)
        reader.feed(text[:30], ended=False)
        reader.feed(text[30:], ended=True)
        assert len(reader.turn.calls) == count


def test_nothing_follows_the_one_call_that_there_may_be() -> None:
    text = f"First.<tool_call>{CALL}</tool_call> And then?"
    reader = TurnReader(Hermes(), several=False)
    pieces = reader.feed(text[:40], ended=False) + reader.feed(text[40:], ended=True)
    assert reader.turn.content == "First."
    assert "And then" not in "".join(piece.text for piece in pieces)


def test_plain_text_is_content() -> None:
    assert whole(Plain(), f"<tool_call>{CALL}") == Turn("", f"<tool_call>{CALL}")
