"""The ranking of a node's tokens by score, computed only as far as it is read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from .cut_offs import CutOffs
from .noise import SMALL, Noise
from .row import Logits, Row, Tokens, reached_by

FEW = 512  # up to so many tokens are scored without being compared first
FIRST = 24  # so many bounds are looked at first, and a few more
_ROUNDED = 2.0**-20  # relative to a score: more than the rounding of it and of its bound
_HUGE, _LOWEST = 3.4e38, float(np.finfo(np.float32).min)


class Contenders:
    """The tokens of a node that may be chosen, found by bounds of their scores: of the processed logits plus noise.

    A race's largest logit and largest noise bound the scores of all its tokens.

    Args:
        row: The node's logits.
        noise: The position's noise; None: none.
        left: The tokens to look at, ascending; None: all.
    """

    def __init__(self, row: Row, noise: Noise | None, left: Tokens | None = None) -> None:
        self._row, self._noise, self._left = row, noise, left
        self.few = left is not None and left.size <= FEW

    @cached_property
    def _bounds(self) -> Logits:
        """The bounds times the temperature: `float32[R]` of all races, or `float32[n]` of the tokens to look at."""
        raw = self._row.raw if self._left is None else self._row.raw[self._left]
        if self._noise is None:
            return raw
        noise = self._noise.bounds * self._row.temperature
        return self._noise.best_of(raw) + noise if self._left is None else raw + noise[self._left % self._noise.races]

    def reaching(self, least: float) -> tuple[Tokens, Logits]:
        """Return all tokens with at least a given score, and their scores `float32`; none scores −∞."""
        if self.few or least == -math.inf:
            tokens = np.arange(self._row.raw.size) if self._left is None else self._left
        else:
            bound = (least - _ROUNDED * (abs(least) + 128)) * float(self._row.temperature)
            tokens = (self._bounds >= np.float32(min(max(bound, -_HUGE), _HUGE))).nonzero()[0]
            if self._left is not None:
                tokens = self._left[tokens]
            elif self._noise:
                tokens = self._noise.tokens_of(tokens)
        self.scored = self.scores(tokens)
        kept = (self.scored >= max(least, _LOWEST)).nonzero()[0]
        return tokens[kept], self.scored[kept]

    def scores(self, tokens: Tokens) -> Logits:
        """Return the scores of some tokens, `float32[n]`."""
        logits = self._row.of(tokens)
        return logits + self._noise.of(tokens) if self._noise else logits

    def thresholds(self, count: int) -> Iterator[float]:
        """Yield falling scores to look for, the last −∞; `reaching` is called with each. None if a logit is unsound.

        The first has few bounds above it; `count` tokens reach the second, if there are so many. With `count` 1, the
        likeliest token, which top-p leaves too, reaches the third.
        """
        if not self.few:
            if not math.isfinite(self._bounds.max()):
                return
            yield reached_by(self._bounds, max(count, FIRST)) / float(self._row.temperature)
            yield float(np.partition(self.scored, -count)[-count]) if self.scored.size >= count else -math.inf
            if self._noise and count == 1:
                yield float(self.scores(np.array([self._row.best]))[0])
        yield -math.inf


def ranking(
    row: Row, noise: Noise | None, cut_offs: CutOffs | None, misses: int | None = None, count: int = 1
) -> Iterator[tuple[int, float]]:
    """Yield tokens and scores, best first, the lowest id first among equals; none that is excluded or scores −∞.

    Args:
        row: The node's logits.
        noise: The position's noise; None: none.
        cut_offs: The cut-offs; None: none.
        misses: End after more than so many tokens that top-p excludes; None: never.
        count: How many tokens the caller expects to read; more are found too, but more slowly.
    """
    found = _ranked(row, noise, cut_offs, count + (misses or 0))
    if cut_offs is None or not cut_offs.cuts_mass:
        yield from found
        return
    out = -math.inf  # top-p excludes this logit and all lower ones
    for token, score in found:
        value = row.value(token)
        if value <= out:
            continue
        if cut_offs.in_top_p(value):
            yield token, score
        elif misses is None:
            out = value
        else:
            misses -= 1
            if misses < 0:
                return


def _ranked(row: Row, noise: Noise | None, cut_offs: CutOffs | None, count: int) -> Iterator[tuple[int, float]]:
    """Yield as `ranking` does, before top-p."""
    left = cut_offs.left if cut_offs else None
    if row.raw.size <= SMALL:
        yield from _one_by_one(row, noise, left)
        return
    above, found = math.inf, Contenders(row, noise, left)
    for least in found.thresholds(count):
        if least < above:
            tokens, scores = found.reaching(least)
            if above < math.inf:
                tokens, scores = tokens[scores < above], scores[scores < above]
            order = np.lexsort((tokens, -scores))
            yield from zip(tokens[order].tolist(), scores[order].tolist(), strict=True)
            above = least


def _one_by_one(row: Row, noise: Noise | None, left: Tokens | None) -> Iterator[tuple[int, float]]:
    """Yield as `_ranked` does, from the scores of all tokens."""
    scores = row.all() + noise.all if noise else row.all().copy()
    scores = scores if left is None else scores[left]
    while scores.size and math.isfinite(score := scores[best := int(scores.argmax())]):
        yield best if left is None else int(left[best]), float(score)
        scores[best] = -math.inf
