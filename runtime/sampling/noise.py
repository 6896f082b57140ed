"""Gumbel noise of one position, of which no more is computed than a choice looks at."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Tokens = NDArray[np.intp]
LEAST = -3.7  # no noise is below: −log(−log(2⁻⁵³)) is −3.60
ALONE = 700  # words in a row that cost as much as one by itself, wherever it is


def gumbel(words: Words) -> NDArray[np.float32]:
    """Standard Gumbel noise `float32[n]` of 64-bit words, of which 52 bits count; a larger word is more noise."""
    uniform = ((words >> np.uint64(12)) + 0.5) * 2.0**-52  # in the open interval (0, 1), exact in float64
    noise: NDArray[np.float32] = (-np.log(-np.log(uniform))).astype(np.float32)
    return noise


class Noise:
    """g(seed, t, ·): 64-bit word x of Philox(key=[seed, t]) is token x's (Salmon et al. 2011).

    Words are compared with thresholds, and few of them become noise: two logarithms cost more than a word. Where few
    tokens are asked for, theirs are the only words, for Philox computes any of its words from the key and a counter.
    """

    def __init__(self, seed: int, position: int, vocab_size: int) -> None:
        self._key = np.array([seed, position], dtype=np.uint64)
        self._vocab_size, self._asked = vocab_size, 0
        self._words: Words | None = None
        self._all: NDArray[np.float32] | None = None
        self._lead: int | None = None

    @property
    def words(self) -> Words:
        """Every token's, `uint64[V]`."""
        if self._words is None:
            self._words = np.random.Philox(key=self._key).random_raw(self._vocab_size)
        return self._words

    @property
    def few(self) -> int:
        """Of how many tokens more the words cost less than all words; 0 once these are there."""
        return 0 if self._words is not None else self._vocab_size // ALONE - self._asked

    def of(self, tokens: Tokens) -> NDArray[np.float32]:
        """The noise of ascending tokens."""
        return gumbel(self._alone(tokens) if tokens.size <= self.few else self.words[tokens])

    def all(self) -> NDArray[np.float32]:
        """Every token's noise."""
        if self._all is None:
            self._all = gumbel(self.words)
        return self._all

    @property
    def lead(self) -> int:
        """The token with most noise."""
        if self._lead is None:
            self._lead = int(self.words.argmax())
        return self._lead

    @property
    def most(self) -> float:
        """The largest noise of all tokens, but for rounding to float32."""
        return self.one(self.lead)

    def one(self, token: int) -> float:
        """A token's noise, but for rounding to float32."""
        return -math.log(-math.log(((int(self.words[token]) >> 12) + 0.5) * 2.0**-52))

    def reaching(self, least: float, tokens: Tokens | None = None) -> NDArray[np.bool_] | None:
        """Who of all tokens, or of these, may have so much noise, `bool`; who is left out has less. None: all may."""
        if not least > LEAST:
            return None
        share = -math.expm1(-math.exp(-least))  # of the words
        first = np.uint64(max(0, (1 << 64) - int(share * 2.0**64 * (1 + 1e-6)) - (1 << 13)))
        return (self.words if tokens is None else self.words[tokens]) >= first

    def leaders(self, count: int) -> Tokens:
        """About the `count` tokens with most noise, or more of them; may be fewer."""
        likely = self.reaching(math.log(self._vocab_size / (4 * count + 16)))
        return np.arange(self._vocab_size) if likely is None else likely.nonzero()[0]

    def _alone(self, tokens: Tokens) -> Words:
        """Their words, one by one."""
        self._asked += tokens.size
        bits, found, block = np.random.Philox(key=self._key), np.empty(tokens.size, dtype=np.uint64), 0
        words: Words = found[:0]
        for i, token in enumerate(tokens.tolist()):
            if token // 4 + 1 != block or not i:
                if token // 4 != block:
                    bits.advance(token // 4 - block)
                words, block = bits.random_raw(4), token // 4 + 1
            found[i] = words[token % 4]
        return found
