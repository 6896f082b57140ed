"""`Detokenizer`: turns token ids into text incrementally, as an output grows."""

from __future__ import annotations

from collections.abc import Sequence

from .stop_strings import automaton
from .tokenizer import Tokenizer


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
            prompt: The prompt's token ids: the output goes on with their text.
            stop: Stop strings.
            min_tokens: A stop string counts only if it is complete after more than so many tokens, wherever it begins.
            skip_special_tokens: Whether to leave special tokens out of the text.
        """
        self._decoder, self._unwatched = tokenizer.decoder(prompt, skip_special_tokens), min_tokens
        self._automaton, self._state = automaton(tuple(stop)) if stop else None, 0
        self.stop_reason: str | None = None  # the stop string that ended the text
        self._waiting = list[int]()  # tokens that are not decoded yet
        self._whole = ""  # all text decoded so far
        self._text = ""  # its final part

    def push(self, token: int) -> bool:
        """Take one token; return whether a stop string is now complete. The text then ends before it."""
        self._waiting.append(token)
        self._unwatched -= 1
        return self._automaton is not None and self._decode()

    @property
    def text(self) -> str:
        """The text so far that will not change."""
        if not self._automaton:
            self._decode()
        return self._text

    def _decode(self) -> bool:
        """Decode the waiting tokens; return whether a stop string is complete."""
        ids, self._waiting = self._waiting, []
        return self._grow(self._decoder.feed(ids)) if ids else False

    def finish(self) -> None:
        """End the output: release the text that was held back."""
        if self.stop_reason:
            return
        self._decode()
        if not self._grow(self._decoder.finish()):
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
