"""The incremental detokenizer: tokens to text as an output grows."""

from __future__ import annotations

from collections.abc import Sequence

from .tokenizer import Tokenizer

_CONTEXT = 8  # prompt tokens that tell the decoder whether the first new one begins a word


class Detokenizer:
    """The text of a growing output, complete characters only, watched for stop strings.

    `text` is final as far as it goes: what may still become a stop string, or is half a character, is held back. Where
    there is no stop string to watch for, tokens are decoded when the text is asked for, several at once.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._ids = list(prompt[-_CONTEXT:])
        self._start, self._read = 0, len(self._ids)  # the text of _ids[_start:_read] is out already
        self._whole = ""  # everything decoded
        self._stopped = False
        self._text = ""  # what is final of it

    def push(self, token: int) -> bool:
        """Take one token; True where a stop string is complete, the text then ends before it."""
        self._ids.append(token)
        return bool(self._stop) and self._decode()

    @property
    def text(self) -> str:
        """What is final."""
        if not self._stop:
            self._decode()
        return self._text

    def _decode(self) -> bool:
        """Decode up to the last token that ends a character; True where a stop string is complete."""
        before = self._tokenizer.decode(self._ids[self._start : self._read]) if self._read < len(self._ids) else ""
        for end in range(len(self._ids), self._read, -1):
            after = self._tokenizer.decode(self._ids[self._start : end])
            if not after.endswith("\ufffd"):
                self._start, self._read = self._read, end
                return self._grow(after[len(before) :])
        return False

    def finish(self) -> None:
        """The output has ended: nothing is held back any longer."""
        if self._stopped:
            return
        before = self._tokenizer.decode(self._ids[self._start : self._read])
        tail = self._tokenizer.decode(self._ids[self._start :])[len(before) :]
        self._start = self._read = len(self._ids)
        if not self._grow(tail):
            self._text = self._whole

    def _grow(self, piece: str) -> bool:
        checked = len(self._whole)
        self._whole += piece
        found = [self._whole.find(stop, max(0, checked - len(stop) + 1)) for stop in self._stop]
        if any(at >= 0 for at in found):
            self._whole, self._stopped = self._whole[: min(at for at in found if at >= 0)], True
        self._text = self._whole[: len(self._whole) - (0 if self._stopped else self._held())]
        return self._stopped

    def _held(self) -> int:
        """Length of the longest tail that may be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._whole)), 0, -1):
            if any(stop.startswith(self._whole[-length:]) for stop in self._stop):
                return length
        return 0
