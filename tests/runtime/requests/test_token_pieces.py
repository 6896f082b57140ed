"""Bytes of tokens by the decoder's steps, for each step that the library has."""

import json

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from specbuild.runtime.errors import ExecutionError
from specbuild.runtime.requests.token_pieces import TokenPieces, steps_of

SPACES = decoders.Replace("▁", " ")
LLAMA = decoders.Sequence([SPACES, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])


def pieces_of(decoder, *names, **added):
    """The pieces of tokens with these names; `added`: texts that are added tokens, and whether they are special."""
    made = tokenizers.Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, names[0]))
    for text, special in sorted(added.items(), key=lambda each: each[1]):
        add = made.add_special_tokens if special else made.add_tokens
        add([AddedToken(text, special=special)])
    if decoder is None:
        return TokenPieces(made, None)
    made.decoder = decoder
    steps = steps_of(json.loads(decoder.__getstate__()))
    assert steps
    return TokenPieces(made, steps)


@pytest.mark.parametrize(
    ("decoder", "name", "first", "later"),
    [
        (decoders.ByteLevel(), "ðŁ", b"\xf0\x9f", None),
        (decoders.ByteLevel(), "a日", "a日".encode(), None),
        (LLAMA, "▁def", b" def", None),
        (LLAMA, "<0xF0>", b"\xf0", None),
        (decoders.Metaspace(), "▁a▁b", b"ab", b" a b"),
        (decoders.Metaspace(prepend_scheme="never"), "▁a", b" a", None),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), "<0xF0>", b"\xf0", None),
        (decoders.WordPiece(), "word", b"word", b" word"),
        (decoders.WordPiece(), "##word", b"##word", b"word"),
        (decoders.WordPiece(cleanup=False), ".", b".", b" ."),
        (None, "word", b"word", b" word"),
        (decoders.Replace(tokenizers.Regex("[ab]+"), "<"), "xaby", b"x<y", None),
        (decoders.Sequence([decoders.Strip("a", 1, 1), decoders.Fuse()]), "aaba", b"ab", None),
    ],
)
def test_a_token_s_bytes(decoder, name, first, later):
    """At a text's beginning, and later on where that differs."""
    assert pieces_of(decoder, name)[0] == (first, later or first, False)


@pytest.mark.parametrize(
    "decoder",
    [
        *(decoders.BPEDecoder(), decoders.CTC()),
        decoders.Sequence([decoders.ByteLevel(), SPACES]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ],
)
def test_decoders_whose_tokens_depend_on_each_other(decoder):
    assert steps_of(json.loads(decoder.__getstate__())) is None


def test_what_is_cut_off_the_beginning_is_told():
    nested = decoders.Sequence([decoders.Sequence([LLAMA]), decoders.Fuse(), decoders.Strip("a", 3, 0)])
    assert pieces_of(nested, "x").strips == ((" ", 1), ("a", 3))


def test_an_added_token_is_text_where_the_alphabet_would_make_no_character_of_it():
    """As "não", whose ã the alphabet takes for a byte; what has a meaning there keeps it, as in the library."""
    pieces = pieces_of(decoders.ByteLevel(), "ã", **{"não": False, "Ġfoo": False, "日本": True})
    assert [piece and piece.later for piece in map(pieces.__getitem__, range(5))] == [
        *(b"\xe3", "não".encode(), b" foo", "日本".encode(), None)
    ]
    assert [piece and piece.special for piece in map(pieces.__getitem__, range(4))] == [False, False, False, True]


def test_an_added_token_s_name_is_the_library_s():
    """One that is found in the normalized text stands for its normalized form, here with a space before it."""
    made = tokenizers.Tokenizer(models.BPE({"▁": 0}, []))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.add_tokens([AddedToken("<a>", normalized=True), AddedToken("<b>", normalized=False)])
    made.decoder = LLAMA
    pieces = TokenPieces(made, steps_of(json.loads(LLAMA.__getstate__())))
    texts = [piece.later.decode() for token in (0, 1, 2) if (piece := pieces[token])]
    assert texts == [" ", " <a>", "<b>"]
    assert made.decode([0, 0, 1, 2]) == "".join(texts)


@pytest.mark.parametrize("token", [-1, 2**40, "a", [1], 1.5])
def test_what_is_no_token_s_number_is_an_error_in_one_line(token):
    with pytest.raises(ExecutionError, match=r"^the bundle's tokenizer cannot make a text of these tokens: .+$"):
        pieces_of(LLAMA, "x")[token]
