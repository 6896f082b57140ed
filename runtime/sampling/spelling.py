"""`Spelling`: tokens that write a text exactly, for llguidance, which forces tokens by it."""

from __future__ import annotations

import re

import tokenizers

from .vocabulary import Vocabulary

_NAME = re.compile(r"<[^<>\s]+>")  # how a Lark grammar names a token
_ANCHOR = "\x02"  # before a text: a tokenizer may add a space at the beginning, and merges nothing with this


class Spelling:
    """Spells texts in a model's tokens; see llguidance's `TokenizerWrapper`.

    A tokenizer alone may write another text: the special token of that name, a normal form, a space before it.

    Attributes:
        tokens: What each token writes. Ids past the model's write the single bytes that no token of the model does.
        special_token_ids: Ids of the tokens that are no text.
        eos_token_id: The first of the ids that end a text.
    """

    is_tokenizer_wrapper, bos_token_id = True, None  # llguidance asks for these

    def __init__(self, vocabulary: Vocabulary, names: bool = False) -> None:
        """Make the spelling of a vocabulary.

        Args:
            vocabulary: The model's tokens.
            names: Whether added tokens such as <think> are no text, so that a grammar can name them.
        """
        named = {token: name for token, name in vocabulary.added.items() if names and _NAME.fullmatch(name)}
        special = vocabulary.special | named.keys()
        written = [b"" if token in special else text for token, text in enumerate(vocabulary.tokens)]
        missing = sorted({bytes([byte]) for byte in range(255)} - {*written})  # UTF-8 has no byte 255
        self._written = written + missing
        self._ids = {text: token for token, text in reversed([*enumerate(self._written)]) if text}
        self._sizes = sorted({len(text) for text in self._ids}, reverse=True)
        self._tokenizer = tokenizers.Tokenizer.from_str(vocabulary.tokenizer)
        self._tokenizer.encode_special_tokens = True  # their names are texts like any other
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.tokens = [*vocabulary.tokens, *missing]
        for token, name in named.items():
            self.tokens[token] = name.encode()
        self.special_token_ids, self.eos_token_id = sorted(special), vocabulary.ends[0]

    def __call__(self, text: str) -> list[int]:
        """Return tokens that write a text: the tokenizer's own, and the longest ones from where those write another."""
        data, found, place = text.encode(), list[int](), 0
        for token in self._usual(text):
            written = self._bytes(token)
            if not written or not data.startswith(written, place):
                break
            found.append(token)
            place += len(written)
        while place < len(data):
            size = next(size for size in self._sizes if data[place : place + size] in self._ids)
            found.append(self._ids[data[place : place + size]])
            place += size
        return found

    def _usual(self, text: str) -> list[int]:
        """Return the tokenizer's own tokens of a text; none if it cannot read it, or merges the anchor with it."""
        try:
            ids: list[int] = self._tokenizer.encode(_ANCHOR + text, add_special_tokens=False).ids
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a Rust panic is not an Exception
            return []
        before = b""
        for place, token in enumerate(ids):
            before += self._bytes(token)
            if before.endswith(_ANCHOR.encode()):
                return ids[place + 1 :]
        return []

    def _bytes(self, token: int) -> bytes:
        return self._written[token] if token < len(self._written) else b""
