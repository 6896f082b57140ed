"""Tokenizers of every kind of decoder, of any size, whose first ids spell parts of characters and whole ones."""

import random

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

SIZE = 512  # tokens, unless a test asks for more
END, MARK = "<|end|>", "<|x|>"  # special tokens of each kind, ids 0 and 1
ADDED = ("não", "日本語", "<think>", "a  b")  # of the kinds that have added tokens: the last ids before MORE's
MORE = "<|late|>"  # a special token among them
SAID = "ab .,!'n\n\téßñ猫語🎉👩\u200d👧\ufffd"
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]


def level_name(data):
    """The name of bytes as byte-level tokenizers write it."""
    return "".join(chr(byte if byte in _PRINTABLE else 256 + _OTHERS.index(byte)) for byte in data)


def _numbered(names, size):
    """The first `size` different names after the special ones, by their ids."""
    listed = list(dict.fromkeys((END, MARK, *names)))
    assert len(listed) >= size, len(listed)
    return {name: number for number, name in enumerate(listed[:size])}


def _words(characters, size):
    rng = random.Random(1)
    for _ in range(4 * size):
        yield "".join(rng.choices(characters, k=rng.randrange(1, 5)))


def _special(made):
    made.add_special_tokens([AddedToken(END, special=True), AddedToken(MARK, special=True)])
    return made


def _of_bytes(size):
    rng, spoken = random.Random(0), SAID.encode()
    starts = [rng.randrange(len(spoken)) for _ in range(4 * SIZE)]
    parts = (spoken[start : start + rng.randrange(2, 6)] for start in starts)
    names = (*(level_name(bytes([byte])) for byte in range(256)), *map(level_name, parts))
    names = (*names, *map(level_name, (word.encode() for word in _words(SAID, size))))
    made = tokenizers.Tokenizer(models.BPE(_numbered(names, size), []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return _special(made)


def byte_level(size=SIZE):
    """GPT-2's: a token is bytes, of parts of characters too."""
    return _of_bytes(size)


def added(size=SIZE):
    """The same with added tokens, of which the alphabet of bytes could spell some otherwise."""
    made = _of_bytes(size - len(ADDED) - 1)
    made.add_tokens([AddedToken(each, normalized=False) for each in ADDED])
    made.add_special_tokens([AddedToken(MORE, special=True)])
    return made


def _sentencepiece(size, *ends):
    names = ("<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", *SAID, *_words(f"▁▁{SAID}", size))
    made = tokenizers.Tokenizer(models.BPE(_numbered(names, size), [], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    made.decoder = decoders.Sequence(parts)
    return _special(made)


def byte_fallback(size=SIZE):
    """Gemma's: pieces of SentencePiece, and a token for each byte."""
    return _sentencepiece(size)


def prefix_space(size=SIZE):
    """Llama 2's: a text's first space is not shown. With added tokens, normalized and not."""
    made = _sentencepiece(size - len(ADDED) - 1, decoders.Strip(" ", 1, 0))
    made.add_tokens([AddedToken(each, normalized=place % 2 == 0) for place, each in enumerate(ADDED)])
    made.add_special_tokens([AddedToken(MORE, special=True)])
    return made


def word_piece(size=SIZE):
    """BERT's: words that a space begins, what goes on after ##, and no space before punctuation."""
    marks = (".", "?", "!", ",", "'", "n't", "'m", "do not", "'s", "'ve", "'re", "' ", "##.", "##'s")
    words = (f"{'##' * (place % 2)}{word}" for place, word in enumerate(_words(SAID, size)))
    made = tokenizers.Tokenizer(models.WordPiece(_numbered(("[UNK]", *marks, *words), size), unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    return _special(made)


def _unigram(size, decoder, *bytes_):
    names = _numbered(("<unk>", *bytes_, "▁", *SAID, *_words(f"▁▁{SAID}", size)), size)
    made = tokenizers.Tokenizer(models.Unigram([(name, -1.0 - number) for name, number in names.items()], 2))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoder
    return _special(made)


def unigram(size=SIZE):
    """T5's: pieces that ▁ begins, the first of a text without it."""
    return _unigram(size, decoders.Metaspace())


def unigram_bytes(size=SIZE):
    """The same with a token for each byte."""
    names = (f"<0x{byte:02X}>" for byte in range(256))
    return _unigram(size, decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), *names)


def undecoded(size=SIZE):
    """One without a decoder: the library puts a space between tokens."""
    made = tokenizers.Tokenizer(models.WordLevel(_numbered(_words(SAID, size), size), MARK))
    return _special(made)


def suffixes(size=SIZE):
    """The first GPT's: </w> ends a word, and the last word's is no space."""
    words = (f"{word}{'</w>' * (place % 2)}" for place, word in enumerate(_words(SAID, size)))
    made = tokenizers.Tokenizer(models.BPE(_numbered(words, size), []))
    made.decoder = decoders.BPEDecoder()
    return _special(made)


def rewritten(size=SIZE):
    """A decoder that rewrites the whole text, across its tokens."""
    made = byte_level(size)
    made.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("ab", "a🎉")])
    return made


KINDS = {
    each.__name__: each
    for each in (
        *(byte_level, byte_fallback, word_piece, unigram, added, prefix_space),
        *(unigram_bytes, undecoded, suffixes, rewritten),
    )
}
