"""`Detokenizer`: turns token ids into text incrementally, as an output grows."""

from __future__ import annotations

from collections.abc import Sequence

from .stop_strings import automaton
from .tokenizer import Tokenizer

_CONTEXT = 8  # prompt tokens that show the decoder whether the first new token begins a word


class Detokenizer:
    """The text of a growing output, in complete characters, cut before the first stop string.

    `text` never changes except by growing: text that may still become a stop string, and partial characters, are held
    back. Without stop strings, tokens are decoded only when `text` is read, several at once.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str],
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        """Make the detokenizer of one output.

        Args:
            tokenizer: Decodes the tokens.
            prompt: The prompt's token ids, of which the last few are context for the first output token.
            stop: Stop strings.
            min_tokens: A stop string counts only if it is complete after more than so many tokens, wherever it begins.
            skip_special_tokens: Whether to leave special tokens out of the text.
        """
        self._tokenizer, self._unwatched = tokenizer, min_tokens
        self._how = {} if skip_special_tokens else {"skip_special_tokens": False}
        self._automaton, self._state = automaton(tuple(stop)) if stop else None, 0
        self.stop_reason: str | None = None  # the stop string that ended the text
        self._ids = list(prompt[-_CONTEXT:])
        self._start, self._read = 0, len(self._ids)  # the text of _ids[_start:_read] is decoded already
        self._whole = ""  # all text decoded so far
        self._text = ""  # its final part

    def push(self, token: int) -> bool:
        """Take one token; return whether a stop string is now complete. The text then ends before it."""
        self._ids.append(token)
        self._unwatched -= 1
        return self._automaton is not None and self._decode()

    @property
    def text(self) -> str:
        """The text so far that will not change."""
        if not self._automaton:
            self._decode()
        return self._text

    def _decode(self) -> bool:
        """Decode up to the last token that completes a character; return whether a stop string is complete."""
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
        """End the output: release the text that was held back."""
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
