"""The tokens of a sequence, prompt and output, in the forms that their readers want."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .prediction import Prediction
from .token_string import string_of


class Text:
    """A text that grows by a token at a time; `tokens` is to be read only.

    `prediction`: what the client expects to follow the prompt; None: nothing.
    """

    def __init__(self, prompt: Sequence[int], max_tokens: int, prediction: Prediction | None = None) -> None:
        self.tokens, self.prediction = list(prompt), prediction
        self._ids = np.empty(max(max_tokens, len(prompt)), dtype=np.int64)
        self._ids[: len(prompt)] = prompt
        self._string = ""

    def append(self, token: int) -> None:
        """Add a token to the end."""
        self._ids[len(self.tokens)] = token
        self.tokens.append(token)
        if self.prediction:
            self.prediction.push(token)

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
