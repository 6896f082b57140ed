"""Gumbel noise of one position, computed only for the tokens that a choice looks at."""

from __future__ import annotations

import math
import threading
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Tokens = NDArray[np.intp]
LEAST = -3.7  # below all noise: −log(−log(2⁻⁵³)) is −3.60
ALONE = 700  # consecutive words that cost as much as a single word computed alone
_STATE: Any = {"bit_generator": "Philox", "buffer": (0, 0, 0, 0), "buffer_pos": 4, "has_uint32": 0, "uinteger": 0}
_KEPT = threading.local()


def _generator(key: tuple[int, int]) -> np.random.Philox:
    """Return this thread's generator, at a key's first word.

    After a step caches are cold, and a new generator takes 0.17 ms, one that is set anew 0.04.
    """
    bits: np.random.Philox = vars(_KEPT).get("bits") or np.random.Philox(0)
    _KEPT.bits, bits.state = bits, _STATE | {"state": {"counter": (0, 0, 0, 0), "key": key}}
    return bits


def gumbel(words: Words) -> NDArray[np.float32]:
    """Return standard Gumbel noise `float32[n]` of 64-bit words, by their upper 52 bits; it grows with the word."""
    uniform = ((words >> np.uint64(12)) + 0.5) * 2.0**-52  # in the open interval (0, 1), exact in float64
    return np.asarray(-np.log(-np.log(uniform)), dtype=np.float32)


class Noise:
    """g(seed, t, ·), the noise at position t: token x has 64-bit word x of Philox(key=[seed, t]) (Salmon et al. 2011).

    Words are compared with thresholds and few of them become noise, because two logarithms cost more than a word. If
    only few tokens are asked for, only their words are computed: Philox computes any word from the key and a counter.
    """

    def __init__(self, seed: int, position: int, vocab_size: int) -> None:
        self._key = seed, position
        self._vocab_size, self._asked = vocab_size, 0

    @cached_property
    def words(self) -> Words:
        """The words of all tokens, `uint64[V]`."""
        return _generator(self._key).random_raw(self._vocab_size)

    @property
    def few(self) -> int:
        """For how many more tokens single words cost less than all words; 0 once all words are computed."""
        return 0 if "words" in self.__dict__ else self._vocab_size // ALONE - self._asked

    def of(self, tokens: Tokens) -> NDArray[np.float32]:
        """Return the noise of some tokens, given in ascending order: `float32[n]`."""
        return gumbel(self._alone(tokens) if tokens.size <= self.few else self.words[tokens])

    @cached_property
    def all(self) -> NDArray[np.float32]:
        """The noise of all tokens, `float32[V]`."""
        return gumbel(self.words)

    @cached_property
    def lead(self) -> int:
        """The token with the largest noise."""
        return int(self.words.argmax())

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
        bits, found, block = _generator(self._key), np.empty(tokens.size, dtype=np.uint64), 0
        words: Words = found[:0]
        for i, token in enumerate(tokens.tolist()):
            if token // 4 + 1 != block or not i:
                if token // 4 != block:
                    bits.advance(token // 4 - block)
                words, block = bits.random_raw(4), token // 4 + 1
            found[i] = words[token % 4]
        return found
