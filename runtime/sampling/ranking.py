"""The ranking of a node's tokens by score, computed only as far as it is read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from .cut_offs import CutOffs
from .noise import MOST_LEVELS, Noise, levels
from .row import Logits, Row, Tokens, reached_by

SMALL = 8192  # vocabulary up to which all noise is computed once per position: comparing per node would cost more
FEW = 512  # up to so many tokens are scored without being compared first
_OCTAVE = math.log(2) * 2.0**-23  # of noise, per level
_ROUNDED = 2.0**-20  # relative to a score: more than the rounding of it and of its bound
_HUGE = 3.4e38


class Contenders:
    """The tokens of a node that may be chosen, found by their scores: processed logit plus noise.

    Noise takes two logarithms, so a bound of the score that takes none tells first which tokens may reach a score:
    −log(−log(1 − u)) is at most −log u, and a word's level is nearly its logarithm.

    Args:
        row: The node's logits.
        noise: The position's noise; None: none.
        left: The tokens to look at, ascending; None: all.
    """

    def __init__(self, row: Row, noise: Noise | None, left: Tokens | None = None) -> None:
        self._row, self._noise, self._left = row, noise, left
        self.few = left is not None and left.size <= max(FEW, noise.few if noise else 0)

    @cached_property
    def _bounds(self) -> Logits:
        """Each token's bound, times the temperature and less the same for all: `float32[n]`."""
        raw = self._row.raw if self._left is None else self._row.raw[self._left]
        if self._noise is None:
            return raw
        found = self._noise.levels if self._left is None else levels(self._noise.words[self._left])
        bounds: Logits = found * np.float32(-_OCTAVE * self._row.temperature)
        return np.add(bounds, raw, out=bounds)

    def reaching(self, least: float) -> tuple[Tokens, Logits]:
        """Return all tokens with at least a given score, ascending, and their scores `float32`; none scores −∞."""
        if self.few or least == -math.inf:
            tokens = np.arange(self._row.raw.size) if self._left is None else self._left
        else:
            bound = least - _ROUNDED * (abs(least) + 128) - (_OCTAVE * MOST_LEVELS if self._noise else 0)
            bound = min(max(bound * float(self._row.temperature), -_HUGE), _HUGE)
            tokens = self._tokens((self._bounds >= np.float32(bound)).nonzero()[0])
        scores = self.scores(tokens)
        kept = (scores >= least) & (scores > -math.inf)
        return tokens[kept], scores[kept]

    def scores(self, tokens: Tokens) -> Logits:
        """Return the scores of some tokens, given in ascending order: `float32[n]`."""
        logits = self._row.of(tokens)
        return logits + self._noise.of(tokens) if self._noise else logits

    @cached_property
    def score(self) -> float:
        """The score of the token with the largest bound."""
        return float(self.scores(self._tokens(np.array([self._bounds.argmax()])))[0])

    def nth(self, count: int) -> float:
        """Return a score that `count` tokens reach, nearly the best of these; −∞ if they are too few."""
        if count == 1:
            return self.score
        least = np.float32(reached_by(self._bounds, count))
        scores = self.scores(self._tokens((self._bounds >= least).nonzero()[0]))
        return float(np.partition(scores, -count)[-count]) if scores.size >= count else -math.inf

    def _tokens(self, found: Tokens) -> Tokens:
        return found if self._left is None else self._left[found]


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
    looked, found = math.inf, Contenders(row, noise, left)
    for least in _steps(found, row, noise, count):
        tokens, scores = found.reaching(least)
        if looked < math.inf:
            fresh = scores < looked
            tokens, scores = tokens[fresh], scores[fresh]
        order = np.argsort(-scores, kind="stable")
        yield from zip(tokens[order].tolist(), scores[order].tolist(), strict=True)
        looked = least


def _one_by_one(row: Row, noise: Noise | None, left: Tokens | None) -> Iterator[tuple[int, float]]:
    """Yield as `_ranked` does, from the scores of all tokens."""
    if left is not None:
        scores = row.of(left) if noise is None else row.of(left) + noise.all[left]
    else:
        scores = row.all().copy() if noise is None else row.all() + noise.all
    while scores.size and math.isfinite(score := scores[best := int(scores.argmax())]):
        yield best if left is None else int(left[best]), float(score)
        scores[best] = -math.inf


def _steps(found: Contenders, row: Row, noise: Noise | None, count: int) -> Iterator[float]:
    """Yield falling score thresholds, the last −∞; none if no token may be chosen or a logit is unsound.

    The first is one that `count` tokens reach, if there are so many. With `count` 1, the likeliest token, which top-p
    leaves too, reaches the last one above −∞.
    """
    if not found.few:
        if not math.isfinite(found.score):
            return
        yield found.nth(count)
        if noise and count == 1:
            yield float(found.scores(np.array([row.best]))[0])
    yield -math.inf
