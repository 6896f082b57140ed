"""A node's logits as its choice sees them: divided by the temperature, but only where they are read."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
Tokens = NDArray[np.intp]
BLOCKS, LEAST_BLOCKS = 8, 256  # blocks of a row per token that `head` looks for, and their minimum
_ROUNDED = 2.0**-21  # relative to a threshold: more than division and rounding to float32 may move it
_TINY, _HUGE = 1e-36, 3.4e38


class Row:
    """The processed logits of one node.

    Attributes:
        raw: Logits `float32[V]`, to be divided by the temperature; neither copied nor changed.
        temperature: The temperature; 1 at temperature 0.
    """

    def __init__(self, raw: Logits, temperature: float = 1.0) -> None:
        self.raw, self.temperature = raw, np.float32(temperature or 1.0)

    @cached_property
    def best(self) -> int:
        """The likeliest token, the lowest id among equals."""
        return int(self.raw.argmax())

    @cached_property
    def largest(self) -> float:
        """Its processed logit; not finite if no token may be chosen or the model gave NaN or infinity."""
        return self.value(self.best)

    def value(self, token: int) -> float:
        """Return a token's processed logit."""
        return float(self.raw[token] / self.temperature)

    def of(self, tokens: Tokens) -> Logits:
        """Return the processed logits of some tokens, `float32[n]`."""
        values: Logits = self.raw[tokens]
        return values if self.temperature == 1 else values / self.temperature

    def all(self) -> Logits:
        """Return the processed logits of all tokens, `float32[V]`; a copy unless the temperature is 1."""
        return self.raw if self.temperature == 1 else self.raw / self.temperature

    def reaching(self, least: float) -> NDArray[np.bool_]:
        """Return `bool[V]`: which processed logits may be at least `least`; those left out are lower, or −∞."""
        least *= float(self.temperature)
        return self.raw >= np.float32(min(max(least - abs(least) * _ROUNDED - _TINY, -_HUGE), _HUGE))

    def head(self, count: int) -> Tokens:
        """Return the `count` likeliest tokens, their equals, and perhaps some of the next likeliest; ascending."""
        return self.reaching(reached_by(self.raw, count) / float(self.temperature)).nonzero()[0]


def reached_by(values: NDArray[np.float32], count: int) -> float:
    """Return a value that at least `count` of `float32[n]` reach, and few others; −∞ if there are too few of them.

    The values are split into blocks, if there are enough. At least `count` reach the `count`-th largest of the blocks'
    maxima, one in each of these blocks. The maxima are sorted, because a partition of many equal values is slow.
    """
    blocks = max(BLOCKS * count, LEAST_BLOCKS)
    width = values.size // blocks
    if width < 2:
        return float(np.sort(values)[-count]) if values.size >= count else -math.inf
    return float(np.sort(values[: width * blocks].reshape(width, blocks).max(axis=0))[-count])
