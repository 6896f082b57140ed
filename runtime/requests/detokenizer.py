"""The incremental detokenizer: tokens to text as an output grows."""

from __future__ import annotations

from collections.abc import Sequence

from .stop_strings import automaton
from .tokenizer import Tokenizer

_CONTEXT = 8  # prompt tokens that tell the decoder whether the first new one begins a word


class Detokenizer:
    """The text of a growing output, complete characters only, watched for stop strings.

    `text` is final as far as it goes: what may still become a stop string, or is half a character, is held back. Where
    there is no stop string to watch for, tokens are decoded when the text is asked for, several at once.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str],
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        """`min_tokens`: a stop string counts that is complete after more tokens, wherever it begins."""
        self._tokenizer, self._unwatched = tokenizer, min_tokens
        self._how = {} if skip_special_tokens else {"skip_special_tokens": False}
        self._automaton, self._state = automaton(tuple(stop)) if stop else None, 0
        self.stop_reason: str | None = None  # the stop string that ended the text
        self._ids = list(prompt[-_CONTEXT:])
        self._start, self._read = 0, len(self._ids)  # the text of _ids[_start:_read] is out already
        self._whole = ""  # everything decoded
        self._text = ""  # what is final of it

    def push(self, token: int) -> bool:
        """Take one token; True where a stop string is complete, the text then ends before it."""
        self._ids.append(token)
        self._unwatched -= 1
        return self._automaton is not None and self._decode()

    @property
    def text(self) -> str:
        """What is final."""
        if not self._automaton:
            self._decode()
        return self._text

    def _decode(self) -> bool:
        """Decode up to the last token that ends a character; True where a stop string is complete."""
        before = self._decoded(self._start, self._read) if self._read < len(self._ids) else ""
        for end in range(len(self._ids), self._read, -1):
            after = self._decoded(self._start, end)
            if not after.endswith("\ufffd"):
                self._start, self._read = self._read, end
                return self._grow(after[len(before) :])
        return False

    def _decoded(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], **self._how)

    def finish(self) -> None:
        """The output has ended: nothing is held back any longer."""
        if self.stop_reason:
            return
        before = self._decoded(self._start, self._read)
        tail = self._decoded(self._start, len(self._ids))[len(before) :]
        self._start = self._read = len(self._ids)
        if not self._grow(tail):
            self._text = self._whole

    def _grow(self, piece: str) -> bool:
        end = len(self._whole)
        self._whole += piece
        if not self._automaton:
            self._text = self._whole
            return False
        self._state, match = self._automaton.read(self._state, piece)
        if match is None or self._unwatched >= 0:
            self._text = self._whole[: len(self._whole) - self._automaton.depth[self._state]]
            return False
        start = end + match.start
        self.stop_reason = self._whole[start : start + match.length]
        self._text = self._whole = self._whole[:start]
        return True
