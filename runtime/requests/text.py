"""The tokens of a sequence, prompt and output, in the forms that their readers want."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

_CHARACTERS = (1 << 20) - 1


class Text:
    """A text that grows by a token at a time; `tokens` is to be read only."""

    def __init__(self, tokens: Sequence[int], max_tokens: int) -> None:
        self.tokens = list(tokens)
        self._ids = np.empty(max(max_tokens, len(tokens)), dtype=np.int64)
        self._ids[: len(tokens)] = tokens
        self._string = ""

    def append(self, token: int) -> None:
        """Add a token to the end."""
        self._ids[len(self.tokens)] = token
        self.tokens.append(token)

    @property
    def history(self) -> NDArray[np.int64]:
        """The tokens as `int64[n]`; a view, not a copy."""
        return self._ids[: len(self.tokens)]

    @property
    def string(self) -> str:
        """The tokens as `string_of` gives them; made as far as it is asked for."""
        if missing := self.tokens[len(self._string) :]:
            self._string += string_of(missing)
        return self._string


def string_of(tokens: Iterable[int]) -> str:
    """Return a text with a character for each token: Python searches strings fastest. Ids past 2²⁰ become others."""
    return "".join([chr(token & _CHARACTERS) for token in tokens])
