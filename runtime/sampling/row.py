"""A node's logits as its choice sees them: divided by the temperature where somebody looks, and not before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
Tokens = NDArray[np.intp]
BLOCKS, LEAST_BLOCKS = 8, 512  # of the row, for each of the likeliest that are looked for, and at least
_ROUNDED = 2.0**-21  # of a threshold: more than dividing and rounding it to float32 may move it
_TINY, _HUGE = 1e-36, 3.4e38


class Row:
    """Processed logits of one node: `raw float32[V]`, to be divided by the temperature; neither copied nor changed.

    best: the likeliest token, the lowest among equals. most: its processed logit; not finite where no token may be
    chosen or the model gave what is no number.
    """

    __slots__ = ("_temperature", "best", "most", "raw")

    def __init__(self, raw: Logits, temperature: float = 1.0) -> None:
        self.raw, self._temperature = raw, np.float32(temperature or 1.0)
        self.best = int(raw.argmax())
        self.most = self.value(self.best)

    def value(self, token: int) -> float:
        """A token's processed logit."""
        return float(self.raw[token] / self._temperature)

    def of(self, tokens: Tokens) -> Logits:
        """The processed logits of these tokens."""
        values: Logits = self.raw[tokens]
        return values if self._temperature == 1 else values / self._temperature

    def all(self) -> Logits:
        """Every token's; a copy where the temperature is not 1."""
        return self.raw if self._temperature == 1 else self.raw / self._temperature

    def reaching(self, least: float) -> NDArray[np.bool_]:
        """Whose processed logit may be at least so much, `bool[V]`; whoever is left out has less, or −∞."""
        least *= float(self._temperature)
        return self.raw >= np.float32(min(max(least - abs(least) * _ROUNDED - _TINY, -_HUGE), _HUGE))

    def head(self, count: int) -> Tokens:
        """The `count` likeliest tokens, their equals, and perhaps some more that come next; ascending.

        Each of the `count` likeliest blocks has a token that is as likely as the last of these blocks. They are sorted,
        for a partition of many equals is slow.
        """
        blocks = max(BLOCKS * count, LEAST_BLOCKS)
        width = self.raw.size // blocks
        if width < 2:
            return np.arange(self.raw.size)
        largest = np.sort(self.raw[: width * blocks].reshape(width, blocks).max(axis=0))
        return self.reaching(float(largest[-count] / self._temperature)).nonzero()[0]
