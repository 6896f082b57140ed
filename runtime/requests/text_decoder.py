"""Text of token ids as they come: the same text, however many come at once."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from .token_pieces import Piece

_CONTEXT = 8  # tokens before the new ones that the library decodes with them
_PARTIAL = 4  # maximum tokens that a character may still be missing from: UTF-8 has up to 4 bytes


class TextDecoder(Protocol):
    """Turns one output's token ids into text. Texts of successive calls add up to the same, however the ids are cut."""

    def feed(self, ids: Iterable[int]) -> str:
        """Return the text that some more ids complete; raises ExecutionError."""
        ...

    def finish(self) -> str:
        """Return the text of what is still incomplete, with U+FFFD for parts of characters; raises ExecutionError."""
        ...


class Pieces(Protocol):
    """The pieces by token, as `TokenPieces` has them."""

    def __getitem__(self, token: int, /) -> Piece | None: ...


class ByteDecoder:
    """Joins the tokens' bytes and decodes them as UTF-8; U+FFFD stands for each maximal subpart of what is not UTF-8.

    Unicode 16, section 3.9, "U+FFFD Substitution of Maximal Subparts", as Python and browsers do.
    """

    def __init__(
        self,
        pieces: Pieces,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
        strips: Sequence[tuple[str, int]] = (),
    ) -> None:
        """Make the decoder of one output.

        Args:
            pieces: What each token adds to the text.
            prompt: The prompt's token ids. A text begins with the prompt, and what is done to a text's beginning is
                done to the output's only if the prompt has no text.
            skip_special_tokens: Whether to leave special tokens out of the text.
            strips: Characters, and how many of each at most are cut off the text's beginning.
        """
        self._pieces, self._skips, self._strips, self._first = pieces, skip_special_tokens, list(strips), True
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for token in prompt:
            self.feed((token,))
            if not self._first and not self._strips:
                break
        self._utf8.reset()

    def feed(self, ids: Iterable[int]) -> str:
        """See `TextDecoder.feed`."""
        data = list[bytes]()
        for token in ids:
            piece = self._pieces[token]
            if piece is None or (piece.special and self._skips):
                continue
            data.append(piece.first if self._first else piece.later)
            self._first = False
        return self._stripped(self._utf8.decode(b"".join(data)))

    def finish(self) -> str:
        """See `TextDecoder.finish`."""
        return self._stripped(self._utf8.decode(b"", True))

    def _stripped(self, text: str) -> str:
        while self._strips and text:
            character, count = self._strips.pop(0)
            cut = min(count, len(text) - len(text.lstrip(character)))
            text = text[cut:]
            if not text and cut < count:
                self._strips.insert(0, (character, count - cut))
        return text


class WindowDecoder:
    """Text by a decoder of the library whose steps are not known token by token, such as one that joins words.

    Each token is decoded after the last few, whatever comes with it: here too the text is a function of the ids. What
    such a decoder would change in text that is already out stays as it is.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], prompt: Sequence[int] = (), special: Collection[int] = ()
    ) -> None:
        """Make the decoder of one output.

        Args:
            decode: The library's decoder.
            prompt: The prompt's token ids.
            special: Token ids to leave out of the text.
        """
        self._decode, self._special = decode, special
        self._context = [token for token in prompt if token not in special][-_CONTEXT:]
        self._waiting = list[int]()  # tokens whose text is still incomplete

    def feed(self, ids: Iterable[int]) -> str:
        """See `TextDecoder.feed`."""
        return "".join(self._step(token) for token in ids if token not in self._special)

    def finish(self) -> str:
        """See `TextDecoder.finish`."""
        return self._take(self._decode(self._context + self._waiting))

    def _step(self, token: int) -> str:
        self._waiting.append(token)
        text = self._decode(self._context + self._waiting)
        if text.endswith("\ufffd") and len(self._waiting) < _PARTIAL:
            return ""
        return self._take(text)

    def _take(self, text: str) -> str:
        before = self._decode(self._context)
        self._context = (self._context + self._waiting)[-_CONTEXT:]
        self._waiting.clear()
        return text[_common(before, text) :]


def _common(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
