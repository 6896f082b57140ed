"""Gumbel noise of one position, computed only for the tokens that a choice looks at."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
Tokens = NDArray[np.intp]
ALONE = 1400  # consecutive words that cost as much as a single word computed alone
MOST_LEVELS = (127 + 32) * 2.0**23  # levels of a word of 2³²
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
    """Return standard Gumbel noise `float32[n]` of words; it falls with the word."""
    share = (words + 0.5) * 2.0**-32  # in the open interval (0, 1), exact in float64
    return np.asarray(-np.log(-np.log1p(-share)), dtype=np.float32)


def levels(words: Words) -> NDArray[np.float32]:
    """Return 2²³ · (127 + log2 word) of each word, up to 0.09 · 2²³ too low, `float32[n]`; 0 for 0.

    A float's bits, read as an integer, are nearly its logarithm (Mitchell 1962), so that no logarithm is taken.
    """
    return words.astype(np.float32).view(np.int32).astype(np.float32)


class Noise:
    """g(seed, t, ·), the noise at position t: token x has 32-bit word x of Philox(key=[seed, t]) (Salmon et al. 2011).

    A word of Philox has 64 bits and serves two tokens, its lower half the first. If only few tokens are asked for, only
    their words are computed: Philox computes any word from the key and a counter.
    """

    def __init__(self, seed: int, position: int, vocab_size: int) -> None:
        self._key = seed, position
        self._vocab_size, self._asked = vocab_size, 0

    @cached_property
    def words(self) -> Words:
        """The words of all tokens, `uint32[V]`."""
        whole = _generator(self._key).random_raw(-(-self._vocab_size // 2))
        return whole.astype("<u8", copy=False).view("<u4")[: self._vocab_size]

    @cached_property
    def levels(self) -> NDArray[np.float32]:
        """The `levels` of all words, `float32[V]`."""
        return levels(self.words)

    @cached_property
    def all(self) -> NDArray[np.float32]:
        """The noise of all tokens, `float32[V]`."""
        return gumbel(self.words)

    @property
    def few(self) -> int:
        """For how many more tokens single words cost less than all words; 0 once all words are computed."""
        return 0 if "words" in self.__dict__ else self._vocab_size // ALONE - self._asked

    def of(self, tokens: Tokens) -> NDArray[np.float32]:
        """Return the noise of some tokens, given in ascending order: `float32[n]`."""
        return gumbel(self._alone(tokens) if tokens.size <= self.few else self.words[tokens])

    def _alone(self, tokens: Tokens) -> Words:
        """Return the words of some tokens, computed one by one."""
        self._asked += tokens.size
        bits, found, whole, after = _generator(self._key), list[int](), list[int](), 0
        for token in tokens.tolist():
            block = token // 8  # Philox makes four words of 64 bits at a time
            if block + 1 != after or not found:
                bits.advance(block - after)
                whole, after = bits.random_raw(4).tolist(), block + 1
            found.append(whole[token % 8 // 2] >> token % 2 * 32 & 0xFFFFFFFF)
        return np.array(found, dtype=np.uint32)
