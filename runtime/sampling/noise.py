"""Gumbel noise of one position, computed only for the tokens that a choice looks at."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Tokens = NDArray[np.intp]
LEAST = -3.7  # below all noise: −log(−log(2⁻⁵³)) is −3.60
ALONE = 700  # consecutive words that cost as much as a single word computed alone


def gumbel(words: Words) -> NDArray[np.float32]:
    """Return standard Gumbel noise `float32[n]` of 64-bit words, by their upper 52 bits; it grows with the word."""
    uniform = ((words >> np.uint64(12)) + 0.5) * 2.0**-52  # in the open interval (0, 1), exact in float64
    noise: NDArray[np.float32] = (-np.log(-np.log(uniform))).astype(np.float32)
    return noise


class Noise:
    """g(seed, t, ·), the noise at position t: token x has 64-bit word x of Philox(key=[seed, t]) (Salmon et al. 2011).

    Words are compared with thresholds and few of them become noise, because two logarithms cost more than a word. If
    only few tokens are asked for, only their words are computed: Philox computes any word from the key and a counter.
    """

    def __init__(self, seed: int, position: int, vocab_size: int) -> None:
        self._key = np.array([seed, position], dtype=np.uint64)
        self._vocab_size, self._asked = vocab_size, 0
        self._words: Words | None = None
        self._all: NDArray[np.float32] | None = None
        self._lead: int | None = None

    @property
    def words(self) -> Words:
        """The words of all tokens, `uint64[V]`."""
        if self._words is None:
            self._words = np.random.Philox(key=self._key).random_raw(self._vocab_size)
        return self._words

    @property
    def few(self) -> int:
        """For how many more tokens single words cost less than all words; 0 once all words are computed."""
        return 0 if self._words is not None else self._vocab_size // ALONE - self._asked

    def of(self, tokens: Tokens) -> NDArray[np.float32]:
        """Return the noise of some tokens, given in ascending order: `float32[n]`."""
        return gumbel(self._alone(tokens) if tokens.size <= self.few else self.words[tokens])

    def all(self) -> NDArray[np.float32]:
        """Return the noise of all tokens, `float32[V]`."""
        if self._all is None:
            self._all = gumbel(self.words)
        return self._all

    @property
    def lead(self) -> int:
        """The token with the largest noise."""
        if self._lead is None:
            self._lead = int(self.words.argmax())
        return self._lead

    @property
    def largest(self) -> float:
        """The largest noise of all tokens, in float64 instead of float32."""
        return self.one(self.lead)

    def one(self, token: int) -> float:
        """Return a token's noise, in float64 instead of float32."""
        return -math.log(-math.log(((int(self.words[token]) >> 12) + 0.5) * 2.0**-52))

    def reaching(self, least: float, tokens: Tokens | None = None) -> NDArray[np.bool_] | None:
        """Return which tokens may have noise of at least `least`; those left out certainly have less.

        Args:
            least: The noise.
            tokens: The token ids to test; None: all.

        Returns:
            `bool`, an element per token; None if all may reach it.
        """
        if not least > LEAST:
            return None
        share = -math.expm1(-math.exp(-least))  # of the words that reach it
        first = np.uint64(max(0, (1 << 64) - int(share * 2.0**64 * (1 + 1e-6)) - (1 << 13)))
        return (self.words if tokens is None else self.words[tokens]) >= first

    def leaders(self, count: int) -> Tokens:
        """Return roughly the `count` tokens with the largest noise, usually more, rarely fewer."""
        likely = self.reaching(math.log(self._vocab_size / (4 * count + 16)))
        return np.arange(self._vocab_size) if likely is None else likely.nonzero()[0]

    def _alone(self, tokens: Tokens) -> Words:
        """Return the words of some tokens, computed one by one."""
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
