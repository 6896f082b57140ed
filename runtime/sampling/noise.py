"""Gumbel noise of one position, computed only for the tokens that a choice looks at.

A token's noise is −log of the time at which its clock rings, an exponential variable of mean 1. In a large vocabulary
32 tokens share a race. Its first clock rings after an exponential time of mean 1/32, and is any of the 32 with the same
chance. Each other clock rings an exponential time of mean 1 later, because such a variable has no memory. So one number
tells the largest noise of 32 tokens, and most of the others are never computed (Maddison et al. 2014 build noise from
its maximum too).
"""

from __future__ import annotations

import math
import threading
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.intp]
Values = NDArray[np.float32]
Times = NDArray[np.float64]
SMALL = 8192  # vocabulary up to which each token runs alone: races would cost more than all noise
_BITS = 5  # of a runner's number: a race has 32 tokens
_GAMMA = 0x9E3779B97F4A7C15
_STATE: Any = {"bit_generator": "Philox", "buffer": (0, 0, 0, 0), "buffer_pos": 4, "has_uint32": 0, "uinteger": 0}
_KEPT = threading.local()


def _generator(key: tuple[int, int]) -> np.random.Philox:
    """Return this thread's generator, at a key's first word.

    After a step caches are cold, and a new generator takes 0.17 ms, one that is set anew 0.04.
    """
    bits: np.random.Philox = vars(_KEPT).get("bits") or np.random.Philox(0)
    _KEPT.bits, bits.state = bits, _STATE | {"state": {"counter": (0, 0, 0, 0), "key": key}}
    return bits


def exponential(words: NDArray[Any], bits: int) -> Times:
    """Return exponential variables of mean 1 from words of so many bits, `float64[n]`; they grow with the word."""
    return -np.log1p((words + 0.5) * -(2.0**-bits))


def mixed(key: int, tokens: Tokens) -> NDArray[np.uint64]:
    """Return 32 bits for each token, `uint64[n]`: the upper half of a SplitMix64 generator's word (Steele et al. 2014).

    Args:
        key: The generator's seed, 64 bits.
        tokens: Which of its words: 0, 1, ….
    """
    z = tokens.view(np.uint64) * np.uint64(_GAMMA) + np.uint64((key + _GAMMA) % 2**64)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (z ^ z >> np.uint64(31)) >> np.uint64(32)


class Noise:
    """g(seed, t, ·), the noise at position t, from the words of Philox(key=[seed, t]) (Salmon et al. 2011).

    Token x is runner ⌊x / R⌋ in race x mod R. A Philox word has 64 bits and serves two races, its lower half the first.
    The upper 27 bits of a half say when the race's first clock rings, the lower 5 which runner's it is. The word after
    them is the key of all later times. If each token runs alone, all 32 bits say when its clock rings.

    Attributes:
        races: R, a multiple of 8.
    """

    def __init__(self, seed: int, position: int, vocab_size: int) -> None:
        self._key, self._vocab_size = (seed, position), vocab_size
        self._bits = _BITS if vocab_size > SMALL else 0
        self.races = -(-vocab_size // (8 << self._bits)) * 8

    @cached_property
    def _words(self) -> NDArray[np.uint64]:
        return _generator(self._key).random_raw(self.races // 2 + 1)

    @cached_property
    def _halves(self) -> NDArray[np.uint32]:
        return self._words[:-1].view(np.uint32)

    @cached_property
    def bounds(self) -> Values:
        """An upper bound of each race's noise, `float32[R]`, mostly within 0.15 of it where the noise is large.

        −log(−log(1 − u)) is at most −log u, and a float's bits, read as an integer, are nearly its logarithm, from
        below (Mitchell 1962). So no logarithm is taken.
        """
        levels = (self._halves >> np.uint32(self._bits)).astype(np.float32).view(np.int32).astype(np.float32)
        return levels * np.float32(-math.log(2) * 2.0**-23) + np.float32(math.log(2) * (127 + 32))

    def of(self, tokens: Tokens) -> Values:
        """Return the noise of some tokens, `float32[n]`."""
        if not self._bits:
            return self.all[tokens]
        runner, race = np.divmod(tokens, self.races)
        halves = self._halves[race]
        later = (halves & np.uint32((1 << self._bits) - 1)) != runner
        times = exponential(halves >> np.uint32(self._bits), 32 - self._bits) * 2.0**-self._bits
        times += later * exponential(mixed(int(self._words[-1]), tokens), 32)
        return (-np.log(times)).astype(np.float32)

    @cached_property
    def all(self) -> Values:
        """The noise of all tokens, `float32[V]`."""
        if self._bits:
            return self.of(np.arange(self._vocab_size))
        return (-np.log(exponential(self._halves[: self._vocab_size], 32))).astype(np.float32)

    def tokens_of(self, races: Tokens) -> Tokens:
        """Return all tokens of some races, `intp[n]`."""
        tokens = (races[:, None] + np.arange(0, self._vocab_size, self.races)).reshape(-1)
        return tokens[tokens < self._vocab_size] if self._vocab_size % self.races else tokens

    def best_of(self, values: Values) -> Values:
        """Return the largest of each race's values, `float32[R]`, of `float32[V]`; NaN if one is, −∞ for no tokens."""
        whole = values.size // self.races * self.races
        found: Values = values[:whole].reshape(-1, self.races).max(axis=0, initial=-np.inf)
        rest = found[: values.size - whole]
        np.maximum(rest, values[whole:], out=rest)
        return found
