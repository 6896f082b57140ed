"""Attacks by stop strings: as many and as long as anybody likes, over any text in any pieces."""

from __future__ import annotations

from typing import Any

import pytest

from specbuild.runtime import SamplingParams
from specbuild.runtime.errors import OptionError
from specbuild.runtime.requests.stop_strings import StopStrings
from specbuild.runtime.sampling.parameters import MAX_STOP_CHARACTERS, MAX_STOPS


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        (["x"] * 10_000, "stop has 10,000 strings"),
        (["x"] * (MAX_STOPS + 1), "at most 64"),
        ("x" * 100_000_000, "100,000,000 characters"),
        (["x" * MAX_STOP_CHARACTERS, "y"], "4,097 characters"),
        (["a\ud800"], "not valid Unicode"),
        ([""], "none of them empty"),
    ],
    ids=["many", "one too many", "long", "together", "surrogate", "empty"],
)
def test_more_than_there_is_room_for_is_refused(stop: Any, words: str) -> None:
    with pytest.raises(OptionError) as caught:
        SamplingParams(stop=stop)
    line = str(caught.value)
    assert words in line
    assert len(line) < 300
    assert "\n" not in line


def test_a_character_is_as_much_work_whatever_the_stop_strings_are() -> None:
    """The worst: each text is nearly a stop string, over and over. Steps are counted, not timed."""
    steps = 0

    class Counting(dict[str, int]):
        def __contains__(self, key: object) -> bool:
            nonlocal steps
            steps += 1
            return super().__contains__(key)

    made = StopStrings(tuple("a" * n + "b" for n in range(1, MAX_STOPS + 1)))
    made._next = [Counting(each) for each in made._next]
    text, state = ("a" * 70 + "c") * 100, 0
    for character in text:
        state, match = made.read(state, character)
        assert match is None
    assert steps <= 3 * len(text)
