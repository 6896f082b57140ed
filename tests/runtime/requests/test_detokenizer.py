"""The text of a growing output: pieces add up, characters stay whole, nothing is taken back, stop strings stop."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.requests.detokenizer import Detokenizer
from specbuild.runtime.requests.tokenizer import Tokenizer

token_lists = st.lists(st.integers(0, 4095), max_size=30)
texts = st.text(st.characters(codec="utf-8"), max_size=30)


class Pieces:
    """A tokenizer whose tokens are given texts."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[token] for token in ids)


def stream(detokenizer: Detokenizer, tokens: Sequence[int]) -> tuple[list[str], bool]:
    """The text after each token and after the end, and whether a stop string ended it."""
    shown, stopped = [""], False
    for token in tokens:
        stopped = detokenizer.push(token)
        shown.append(detokenizer.text)
        if stopped:
            break
    detokenizer.finish()
    shown.append(detokenizer.text)
    for before, after in itertools.pairwise(shown):
        assert after.startswith(before), "text was taken back"
    return shown, stopped


def over_pieces(pieces: Sequence[str], stop: Sequence[str], min_tokens: int = 0) -> tuple[str, bool]:
    detokenizer = Detokenizer(Pieces(pieces), [], stop, min_tokens)  # type: ignore[arg-type]
    shown, stopped = stream(detokenizer, range(len(pieces)))
    return shown[-1], stopped


@settings(deadline=None, max_examples=200)
@given(tokens=token_lists, prompt=texts)
def test_pieces_of_any_tokens_add_up_to_their_text(tokenizer: Tokenizer, tokens: list[int], prompt: str) -> None:
    shown, stopped = stream(Detokenizer(tokenizer, tokenizer.encode(prompt), ()), tokens)
    assert shown[-1] == tokenizer.decode(tokens)
    assert not stopped


@settings(deadline=None, max_examples=200)
@given(text=texts, prompt=texts)
def test_a_character_is_never_split(tokenizer: Tokenizer, text: str, prompt: str) -> None:
    text = text.replace("\ufffd", "")
    tokens = [token for byte in text for token in tokenizer.encode(byte)]  # one character at a time: many tokens
    shown, _ = stream(Detokenizer(tokenizer, tokenizer.encode(prompt), ()), tokens)
    assert shown[-1] == text
    assert not any("\ufffd" in out for out in shown)


def test_text_comes_as_soon_as_it_is_whole(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("🙂a")
    assert len(tokens) > 2
    detokenizer, shown = Detokenizer(tokenizer, [], ()), list[str]()
    for token in tokens:
        detokenizer.push(token)
        shown.append(detokenizer.text)
    assert shown[-2:] == ["🙂", "🙂a"]
    assert set(shown[:-2]) == {""}


def test_a_token_costs_the_same_however_long_the_text() -> None:
    class Counting(Pieces):
        most = 0

        def decode(self, ids: Sequence[int]) -> str:
            self.most = max(self.most, len(ids))
            return super().decode(ids)

    counting = Counting(["a", "b"])
    shown, _ = stream(Detokenizer(counting, [0] * 1000, ["zz"]), [0, 1] * 200)  # type: ignore[arg-type]
    assert shown[-1] == "ab" * 200
    assert counting.most < 16


def test_half_a_character_at_the_end_is_shown_as_such(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("🙂")[:-1]
    shown, _ = stream(Detokenizer(tokenizer, [], ()), tokens)
    assert shown[-2] == ""
    assert shown[-1] == tokenizer.decode(tokens)
    assert "\ufffd" in shown[-1]


@settings(deadline=None, max_examples=300)
@given(
    pieces=st.lists(st.text("abc", min_size=0, max_size=4), max_size=12),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
)
def test_stop_strings_in_any_pieces(pieces: list[str], stop: list[str]) -> None:
    whole = "".join(pieces)
    text, stopped = over_pieces(pieces, stop)
    assert stopped == any(s in whole for s in stop)
    assert not any(s in text for s in stop)
    if stopped:
        assert any(whole.startswith(text + s) for s in stop)
    else:
        assert text == whole


@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        (["x", "a", "b", "y"], ["ab"], "x"),
        (["xa", "by"], ["ab"], "x"),
        (["ab"], ["ab"], ""),
        (["a", "a", "b"], ["ab"], "a"),
        (["ababa", "bc"], ["abc"], "abab"),
        (["x", "ab", "cd", "e"], ["abcde", "zz"], "x"),
        (["x", "y"], ["z", "y"], "x"),
        (["x\n", "\ny"], ["\n\n"], "x"),
        (["日", "本語"], ["本"], "日"),
    ],
)
def test_text_ends_before_the_stop_string(pieces: list[str], stop: list[str], text: str) -> None:
    assert over_pieces(pieces, stop) == (text, True)


@pytest.mark.parametrize("stop", [["cd", "bc"], ["bc", "cd"]])
def test_text_ends_before_the_first_of_two_overlapping_stop_strings(stop: list[str]) -> None:
    assert over_pieces(["a", "b", "c", "d"], stop) == ("a", True)
    assert over_pieces(["abcd"], stop) == ("a", True)


def test_what_may_become_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(Pieces(["xa", "b", "z", "ab"]), [], ["abc"])  # type: ignore[arg-type]
    shown = []
    for token in range(4):
        assert not detokenizer.push(token)
        shown.append(detokenizer.text)
    assert shown == ["x", "x", "xabz", "xabz"]
    detokenizer.finish()
    assert detokenizer.text == "xabzab"


def test_a_stop_string_of_the_prompt_does_not_stop(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("def stop")
    shown, stopped = stream(Detokenizer(tokenizer, prompt, ["stop", "p("]), tokenizer.encode("(x)"))
    assert (shown[-1], stopped) == ("(x)", False)


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    shown, _ = stream(Detokenizer(tokenizer, [], ()), [*tokenizer.encode("a"), 0])
    assert shown[-1] == "a"


@pytest.mark.parametrize(
    ("pieces", "stop", "min_tokens", "text", "stopped"),
    [
        ("a|x|b|x|c", "x", 1, "a", True),
        ("a|x|b|x|c", "x", 2, "axb", True),
        ("a|x|b|x|c", "x", 4, "axbxc", False),
        ("a|x|y|c", "xy", 2, "a", True),  # it begins before there are enough, and is complete after
        ("a|xy|c", "xy", 2, "axyc", False),
        ("a|a|a|a", "aa", 2, "a", True),  # the one that is complete counts no more, the next one overlaps it
        ("ab|c|d", "ab,abc", 1, "", True),
    ],
)
def test_a_stop_string_counts_where_it_is_complete_after_enough_tokens(
    pieces: str, stop: str, min_tokens: int, text: str, stopped: bool
) -> None:
    """As in vLLM."""
    assert over_pieces(pieces.split("|"), stop.split(","), min_tokens) == (text, stopped)


@settings(deadline=None, max_examples=300)
@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 12),
)
def test_what_ends_a_text_is_what_a_search_after_each_token_finds(
    pieces: list[str], stop: list[str], min_tokens: int
) -> None:
    whole, expected = "", None
    for count, piece in enumerate(pieces, 1):
        begun, whole = len(whole), whole + piece
        found = [(at, at + len(each)) for each in stop for at in range(len(whole)) if whole.startswith(each, at)]
        ends = [at for at, end in found if end > begun]
        if count > min_tokens and ends:
            expected = whole[: min(ends)], True
            break
    assert over_pieces(pieces, stop, min_tokens) == (expected or (whole, False))
