"""Bytes become text by Unicode's rule, a text's beginning is its only one, and windows give one text for any cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spellings import Spelling
from tokenizers import decoders

from specbuild.runtime.requests.text_decoder import ByteDecoder, WindowDecoder

PARTS = [
    *(b"a", b"\xc3", b"\xa9", b"\xe2\x96", b"\x81", b"\xf0\x9f", b"\x8e\x89", b"\xff", b"", "é🎉\ufeff".encode()),
    *(b"\xc0\xaf", b"\xe0\x80\xbf", b"\xf0\x81\x82"),  # longer than they need to be
    *(b"\xed\xa0\x80", b"\xed\xaf", b"\xf4\x91\x92\x93", b"\xe1\x80", b"\xf1\xbf"),  # surrogates, too large, cut short
]


def whole(decoder, ids, cuts=()):
    """The text of ids that come in several calls."""
    ends = [*sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    starts = [0, *ends[:-1]]
    return "".join(decoder.feed(ids[start:end]) for start, end in zip(starts, ends, strict=True)) + decoder.finish()


def spelt(*data):
    return Spelling(data.__getitem__)


@given(ids=st.lists(st.integers(0, len(PARTS) - 1)), cuts=st.lists(st.integers(0, 20)))
def test_the_text_is_that_of_all_bytes_at_once(ids, cuts):
    """By the rule of Unicode 16, table 3-8, as Python has it: a replacement for each maximal subpart."""
    expected = b"".join(PARTS[token] for token in ids).decode(errors="replace")
    assert whole(ByteDecoder(spelt(*PARTS)), ids, cuts) == expected


@given(
    text=st.text(" ab", max_size=8),
    strips=st.lists(st.tuples(st.sampled_from(" a"), st.integers(0, 3)), max_size=3),
    cuts=st.lists(st.integers(0, 8)),
)
def test_what_is_cut_off_the_beginning_is_what_the_library_cuts(text, strips, cuts):
    library = decoders.Sequence([decoders.Fuse(), *(decoders.Strip(each, count, 0) for each, count in strips)])
    made = ByteDecoder(Spelling(text.__getitem__), strips=strips)
    assert whole(made, range(len(text)), cuts) == library.decode(list(text))


@pytest.mark.parametrize(("prompt", "text"), [([], "x"), ([1], "x"), ([2], " x"), ([1, 2], " x"), ([0], " x")])
def test_only_the_text_s_beginning_is_cut(prompt, text):
    """The prompt is its beginning, if it has any text."""
    assert whole(ByteDecoder(spelt(b" ", b"", b"a", b" x"), prompt, strips=[(" ", 1)]), [3]) == text


def test_half_a_character_of_the_prompt_is_not_the_output_s():
    """An output's text is a function of its own ids."""
    assert whole(ByteDecoder(spelt(b"\xf0\x9f", b"\x8e\x89"), [0]), [1]) == "\ufffd\ufffd"


def joined(ids):
    """A decoder that puts a space between words and writes the last one in capitals."""
    words = ["ab"[token] for token in ids]
    return " ".join([*words[:-1], *(word.upper() for word in words[-1:])])


@given(ids=st.lists(st.integers(0, 1)), cuts=st.lists(st.integers(0, 20)), prompt=st.lists(st.integers(0, 1)))
def test_windows_give_one_text_for_any_cut(ids, cuts, prompt):
    assert whole(WindowDecoder(joined, prompt), ids, cuts) == whole(WindowDecoder(joined, prompt), ids)


def test_a_window_never_loses_a_token():
    """What the library would change in text that is out stays: here each word had been the last."""
    assert whole(WindowDecoder(joined), [0, 1, 0]) == "Aa Bb A"


def test_a_window_is_as_long_however_long_the_text():
    lengths = list[int]()

    def decode(ids):
        lengths.append(len(ids))
        return "\ufffd" * len(ids)

    assert whole(WindowDecoder(decode, [0] * 100, {7}), [0, 7] * 300) == "\ufffd" * 300
    assert max(lengths) < 16
