"""`Detokenizer`: turns token ids into text incrementally, as an output grows."""

from __future__ import annotations

from collections.abc import Sequence

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
        self._stop, self._held = stop, 0  # the last characters of the text that may become a stop string
        self.stop_reason: str | None = None  # the stop string that ended the text
        self._waiting = list[int]()  # tokens that are not decoded yet
        self._whole = ""  # all text decoded so far
        self._text = ""  # its final part

    def push(self, token: int) -> bool:
        """Take one token; return whether a stop string is now complete. The text then ends before it."""
        self._waiting.append(token)
        self._unwatched -= 1
        return bool(self._stop) and self._decode()

    @property
    def text(self) -> str:
        """The text so far that will not change."""
        if not self._stop:
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
        """Add a piece; return whether a stop string ends in it: the one that begins first, and of those the shortest.

        What may still become one is held back: at most what was before, and the piece.
        """
        end, longest = len(self._whole), self._held + len(piece)
        self._whole += piece
        starts = [(self._whole.find(each, max(end - len(each) + 1, 0)), len(each), each) for each in self._stop]
        found = min((match for match in starts if match[0] >= 0), default=None)
        if found and self._unwatched < 0:
            start, _, self.stop_reason = found
            self._text = self._whole = self._whole[:start]
            return True
        beginnings = (each[:size] for each in self._stop for size in range(1, min(len(each) - 1, longest) + 1))
        self._held = max((len(each) for each in beginnings if self._whole.endswith(each)), default=0)
        self._text = self._whole[: len(self._whole) - self._held]
        return False
