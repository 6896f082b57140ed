"""Attacks by stop strings: as many and as long as anybody likes, over any text in any pieces."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from spellings import Spelling

from specbuild.runtime import SamplingParams
from specbuild.runtime.errors import OptionError
from specbuild.runtime.requests.detokenizer import Detokenizer
from specbuild.runtime.requests.stop_strings import StopStrings, automaton
from specbuild.runtime.requests.tokenizer import Tokenizer
from specbuild.runtime.sampling.parameters import MAX_STOP_CHARACTERS, MAX_STOPS


class SearchEach:
    """What the detokenizer did before it had an automaton: a search for each stop string after each piece."""

    def __init__(self, stop: Sequence[str]) -> None:
        self.stop, self.whole, self.text, self.stopped = stop, "", "", False

    def grow(self, piece: str) -> bool:
        checked = len(self.whole)
        self.whole += piece
        found = [self.whole.find(stop, max(0, checked - len(stop) + 1)) for stop in self.stop]
        if any(at >= 0 for at in found):
            self.whole, self.stopped = self.whole[: min(at for at in found if at >= 0)], True
        self.text = self.whole[: len(self.whole) - (0 if self.stopped else self.held())]
        return self.stopped

    def held(self) -> int:
        longest = max((len(stop) for stop in self.stop), default=1) - 1
        for length in range(min(longest, len(self.whole)), 0, -1):
            if any(stop.startswith(self.whole[-length:]) for stop in self.stop):
                return length
        return 0


def cut(text: str, sizes: list[int]) -> list[bytes]:
    data, pieces = text.encode(), list[bytes]()
    for size in [*sizes, len(data)]:
        pieces.append(data[:size])
        data = data[size:]
    return [piece for piece in pieces if piece]


@settings(deadline=None, max_examples=500)
@given(
    text=st.text("abé日🙂\ufffd", max_size=24),
    sizes=st.lists(st.integers(1, 5), max_size=24),
    stop=st.lists(st.text("abé日🙂\ufffd", min_size=1, max_size=5), min_size=1, max_size=8),
)
@example(text="abc", sizes=[1, 1, 1], stop=["abc", "b"])
@example(text="abab", sizes=[3, 1], stop=["bab", "ab", "a\ufffd"])
@example(text="日🙂", sizes=[1, 1, 2, 1], stop=["\ufffd", "🙂"])
def test_the_text_is_what_a_search_for_each_gives(text: str, sizes: list[int], stop: list[str]) -> None:
    pieces = cut(text, sizes)
    tokenizer: Any = Spelling(pieces.__getitem__)
    tokens = range(len(pieces))
    made, oracle, whole = Detokenizer(tokenizer, [], stop), SearchEach(stop), ""
    utf8 = codecs.getincrementaldecoder("utf-8")()
    for token in tokens:
        piece = utf8.decode(pieces[token])
        whole += piece
        stopped = oracle.grow(piece) if piece else False
        assert made.push(token) is stopped
        assert made.text == oracle.text
        if stopped:
            assert made.stop_reason in stop
            assert oracle.whole + (made.stop_reason or "") == whole[: len(oracle.whole) + len(made.stop_reason or "")]
            break
    made.finish()
    assert made.text == (oracle.text if oracle.stopped else text)


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


def test_the_most_stop_strings_there_may_be(tokenizer: Tokenizer) -> None:
    stop = tuple(f"{n:064d}" for n in range(MAX_STOPS))
    params = SamplingParams(stop=stop)
    made = Detokenizer(tokenizer, [], params.stop)
    for token in tokenizer.encode("x" + stop[17] + "y"):
        if made.push(token):
            break
    assert (made.text, made.stop_reason) == ("x", stop[17])
    assert automaton(stop) is automaton(params.stop), "made when the request is, not by the worker"  # type: ignore[arg-type]
